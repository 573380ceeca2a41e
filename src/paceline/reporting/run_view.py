"""A run as a report sees it: its losses with the line of the file that each came from, its times and its summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import UserError
from paceline.measuring.reading import RunTimes, read_times
from paceline.record.run_dir import RunDir
from paceline.record.summary import Summary, read_summary
from paceline.spec import RunSpec


class Point(NamedTuple):
    step: int
    loss: float
    line: int
    """Of the events file, from 1."""


@dataclass(frozen=True)
class RunView:
    """One run. `times` is None where it has too few steps."""

    name: str
    path: Path
    spec: RunSpec
    summary: Summary | None
    """Of a run that ended."""
    start: dict[str, Any]
    points: tuple[Point, ...]
    torn: int
    """Lines that could not be read: a kill or a disk."""
    times: RunTimes | None

    @property
    def ranks(self) -> int:
        ended = self.summary.ranks if self.summary is not None else None
        return int(ended or self.start.get("ranks") or self.spec.parallel.ranks)

    @property
    def status(self) -> str:
        return self.summary.status if self.summary is not None else "not finished"

    @property
    def file(self) -> Path:
        return RunDir(self.path).events_file(0)


def read_run(path: Path, name: str = "") -> RunView:
    """A run from its folder; UserError where there is nothing to show of it."""
    run = RunDir.open(path)
    spec = run.spec()
    points, steps, start, torn = _events(run.events_file(0))
    if not points:
        raise UserError(f"{path} has no step that can be read: {_why(run)}")
    summary = read_summary(run.summary_file) if run.summary_file.is_file() else None
    times = None
    if summary is not None:
        with suppress(UserError):
            times = read_times(run, steps)
    return RunView(name or run.name, path, spec, summary, start, tuple(points), torn, times)


def _why(run: RunDir) -> str:
    file = run.events_file(0)
    if not file.is_file():
        return f"{file.relative_to(run.path)} does not exist"
    return f"{file.relative_to(run.path)} is empty" if not file.stat().st_size else "it ended before its first step"


def _events(file: Path) -> tuple[list[Point], list[dict[str, Any]], dict[str, Any], int]:
    """The steps that count, as `read_steps` has them, with the line of each; the first "start"; torn lines."""
    points: list[Point] = []
    steps: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    torn = 0
    if not file.is_file():
        return points, steps, start, torn
    decode = json.JSONDecoder().decode
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = decode(line.decode())
                kind, step = event["kind"], event.get("step")
            except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
                torn += bool(line.strip())
                continue
            if kind == "start" and not start:
                start = event
            if kind not in ("step", "resume") or not isinstance(step, int):
                continue
            while points and points[-1].step >= (step if kind == "step" else step + 1):
                points.pop()
                steps.pop()
            if kind == "step":
                loss = event.get("loss")
                points.append(Point(step, math.nan if loss is None else float(loss), number))
                steps.append(event)
    return points, steps, start, torn


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about so many points; of each stretch, the lowest and the highest stay, so no spike is lost."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(2 * len(points) / most)
    kept: list[Point] = [points[0]]
    for begin in range(0, len(points), width):
        stretch = [p for p in points[begin : begin + width] if math.isfinite(p.loss)] or points[begin : begin + 1]
        ends = {min(stretch, key=lambda p: p.loss), max(stretch, key=lambda p: p.loss)}
        kept += sorted(ends, key=lambda p: p.step)
    return sorted({p.step: p for p in [*kept, points[-1]]}.values(), key=lambda p: p.step)


def loss_differences(reference: RunView, other: RunView) -> list[tuple[int, float]]:
    """(step, relative difference of the loss) at the steps that both have."""
    ours = {p.step: p.loss for p in reference.points}
    both = [p for p in other.points if p.step in ours and math.isfinite(p.loss) and math.isfinite(ours[p.step])]
    return [(p.step, abs(p.loss - ours[p.step]) / max(abs(ours[p.step]), 1e-30)) for p in both]
