"""Pictures of a run as a page shows them, the first and the last: those that it wrote at its evaluations
(`Workload.pictures`), and those that are drawn now (`Entry.draw`)."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plain_files import open_plain, read_bytes
from paceline.record.run_dir import RunDir
from paceline.registry import BUILT_IN, entry_of, resolve
from paceline.reporting.run_view import RunView

MOST_RUNS = 4
PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1 << 24
"""Of a picture."""


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
        return "data:image/png;base64," + base64.b64encode(read_bytes(self.file)).decode()


def pictures_of(runs: Sequence[RunView]) -> list[Picture]:
    return [picture for run in runs[:MOST_RUNS] for picture in _ends(run)]


def _ends(run: RunView) -> list[Picture]:
    name = run.spec.workload
    if name in BUILT_IN and (draw := entry_of(name).draw):
        resolve(draw)(run.path)
    by_name: dict[str, list[Picture]] = {}
    for file in sorted(RunDir(run.path).pictures.glob("*.png")):
        if (found := re.fullmatch(r"(\w.*)-(\d{1,18})", file.stem)) and _is_own_picture(file, run.path):
            by_name.setdefault(found[1], []).append(Picture(run.name, found[1], int(found[2]), file))
    series = [sorted(some, key=lambda picture: picture.step) for some in by_name.values()]
    return [picture for some in series for picture in (some if len(some) < 2 else (some[0], some[-1]))]


def _is_own_picture(file: Path, folder: Path) -> bool:
    """Whether it is one, and lies in the run's folder: a page is shown to others, and a link may lead to any file."""
    if not file.resolve().is_relative_to(folder.resolve()):
        return False
    try:
        with open_plain(file) as content:
            return content.read(len(PNG)) == PNG and file.stat().st_size <= MOST_BYTES
    except OSError:
        return False
