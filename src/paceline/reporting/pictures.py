"""Pictures of a run as a page shows them, the first and the last: those that it wrote at its evaluations
(`Workload.pictures`), and those that are drawn now (`Entry.draw`)."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.record.run_dir import RunDir
from paceline.registry import BUILT_IN, entry_of, resolve
from paceline.reporting.run_view import RunView

MOST_RUNS = 4


@dataclass(frozen=True)
class Picture:
    run: str
    name: str
    step: int
    file: Path

    @property
    def caption(self) -> str:
        return f"{self.run}, {self.name.replace('_', ' ')}, step {self.step:,}"

    @property
    def address(self) -> str:
        """The picture itself: the page is one file."""
        return "data:image/png;base64," + base64.b64encode(self.file.read_bytes()).decode()


def pictures_of(runs: Sequence[RunView]) -> list[Picture]:
    return [picture for run in runs[:MOST_RUNS] for picture in _ends(run)]


def _ends(run: RunView) -> list[Picture]:
    name = run.spec.workload
    if name in BUILT_IN and (draw := entry_of(name).draw):
        resolve(draw)(run.path)
    by_name: dict[str, list[Picture]] = {}
    for file in sorted(RunDir(run.path).pictures.glob("*.png")):
        if found := re.fullmatch(r"(\w.*)-(\d+)", file.stem):
            by_name.setdefault(found[1], []).append(Picture(run.name, found[1], int(found[2]), file))
    series = [sorted(some, key=lambda picture: picture.step) for some in by_name.values()]
    return [picture for some in series for picture in (some if len(some) < 2 else (some[0], some[-1]))]
