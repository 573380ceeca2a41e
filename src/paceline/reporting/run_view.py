"""Runs as a report sees them: losses with the line of the file that each came from, and whether they are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import UserError
from paceline.measuring.reading import RunTimes, read_times
from paceline.parity import TOLERANCE
from paceline.record.events import metrics_of, read_lines, steps_that_count
from paceline.record.run_dir import RunDir
from paceline.record.summary import Summary, read_summary
from paceline.spec import RunSpec
from paceline.training.answer import MAY_CHANGE, MUST_STAY
from paceline.training.extension import LENGTHS

SAME_ANSWER = tuple(key for key in MAY_CHANGE if key not in ("data.path", "data.test_path", "data.tokenizer"))
"""Keys, or how they begin, with which the losses of a run stay what they are; data that were moved may be others."""
AS_EQUAL = 100
"""Times the tolerance of `paceline check`: these runs may be as long as they like."""


class Point(NamedTuple):
    step: int
    loss: float
    line: int
    """Of the events file, from 1."""


class Evaluated(NamedTuple):
    step: int
    metrics: dict[str, float]
    line: int


@dataclass(frozen=True)
class Curves:
    """Values of the steps of a run, in the order of its points; nan where there is none."""

    lr: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()
    """Samples per second."""
    compute: tuple[float, ...] = ()
    """Share of the step."""


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
    curves: Curves = Curves()
    evaluations: tuple[Evaluated, ...] = ()
    usage: tuple[dict[str, Any], ...] = ()
    """Events: how busy the device of the main rank was, now and then."""
    noticed: tuple[str, ...] = ()
    """While it ran: losses that jumped, ranks that were slow."""

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
    spec = run.recorded_spec()
    lines = list(read_lines(run.events_file(0)))
    events = [event for _, event in lines if event is not None]
    for number, event in lines:
        if event is not None:
            event["line"] = number
    steps = steps_that_count(events)
    if not steps:
        raise UserError(f"{path} has no step that can be read: {_why(run)}")
    points = tuple(Point(s["step"], math.nan if s.get("loss") is None else float(s["loss"]), s["line"]) for s in steps)
    start = next((event for event in events if event["kind"] == "start"), {})
    summary = read_summary(run.summary_file) if run.summary_file.is_file() else None
    times = None
    with suppress(UserError):
        times = read_times(run, steps) if summary is not None else None
    evaluated = steps_that_count((e for e in events if e["kind"] in ("evaluate", "resume")), "evaluate")
    return RunView(
        name=name or run.name,
        path=path,
        spec=spec,
        summary=summary,
        start=start,
        points=points,
        torn=len(lines) - len(events),
        times=times,
        curves=_curves(steps),
        evaluations=tuple(Evaluated(e["step"], metrics_of(e), e["line"]) for e in evaluated),
        usage=tuple(event for event in events if event["kind"] == "usage"),
        noticed=tuple(str(event.get("text", "")) for event in events if event["kind"] == "notice"),
    )


def _curves(steps: Sequence[dict[str, Any]]) -> Curves:
    def of(name: str) -> tuple[float, ...]:
        return tuple(_float(step.get(name)) for step in steps)

    step_s = [math.nan if step.get("compiled") else _float(step.get("step_s")) or math.nan for step in steps]
    rate = tuple(batch / s for batch, s in zip(of("batch"), step_s, strict=True))
    compute = tuple(part / s for part, s in zip(of("compute_s"), step_s, strict=True))
    return Curves(of("lr"), of("grad_norm"), rate, compute)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _why(run: RunDir) -> str:
    file = run.events_file(0)
    if not file.is_file():
        return f"{file.relative_to(run.path)} does not exist"
    return f"{file.relative_to(run.path)} is empty" if not file.stat().st_size else "it ended before its first step"


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
    """(step, relative difference of the loss) at the steps of both; infinite where one alone is finite."""
    ours = {p.step: p.loss for p in reference.points}
    pairs = [(p.step, ours[p.step], p.loss) for p in other.points if p.step in ours]
    return [(step, _difference(a, b)) for step, a, b in pairs if math.isfinite(a) or math.isfinite(b)]


def _difference(ours: float, other: float) -> float:
    finite = math.isfinite(ours) and math.isfinite(other)
    return abs(other - ours) / max(abs(ours), 1e-30) if finite else math.inf


@dataclass(frozen=True)
class Comparison:
    runs: int
    steps: int
    """That all of them have in common with the first."""
    differing: tuple[str, ...]
    """Keys of the specs that ask for another training; the losses say nothing then."""
    largest: float
    """Relative difference of the losses to those of the first run."""
    run: str
    step: int
    """Where that is."""
    tolerance: float

    @property
    def text(self) -> str:
        if self.differing:
            return f"The runs differ in {', '.join(self.differing[:4])}, so their losses are not expected to be equal."
        if not self.steps:
            return "The runs have no loss of the same step, so nothing is compared."
        if math.isinf(self.largest):
            return (
                f"The runs did not train the same thing: only some losses are finite ({self.run} at step {self.step})."
            )
        same = f"All {self.runs} runs trained the same thing"
        if not self.largest:
            return f"{same}: the losses are equal to the last digit over {self.steps} steps."
        told = f"the losses differ by {self.largest:.1e} at most (relative, {self.run} at step {self.step})"
        head = same if self.largest <= self.tolerance else "The runs did not train the same thing"
        return f"{head}: {told}, over {self.steps} steps."


def compared(runs: Sequence[RunView]) -> Comparison | None:
    """The largest difference of the losses says whether they are the same; None for one run."""
    if len(runs) < 2:
        return None
    first, *others = runs
    values = [_what_decides(run.spec) for run in runs]
    keys = dict.fromkeys(key for found in values for key in found)
    differing = tuple(key for key in keys if any(found.get(key) != values[0].get(key) for found in values[1:]))
    found = [] if differing else [(run.name, loss_differences(first, run)) for run in others]
    largest, name, step = 0.0, "", 0
    for other, differences in found:
        for at, difference in differences:
            if difference > largest:
                largest, name, step = difference, other, at
    tolerance = AS_EQUAL * TOLERANCE[first.spec.train.precision]
    steps = min((len(differences) for _, differences in found), default=0)
    return Comparison(len(runs), steps, differing, largest, name, step, tolerance)


def same_work(runs: Sequence[RunView]) -> bool:
    """Whether a sample asks all of them for the same: then, and only then, their speeds can be compared."""
    alike = ("workload", "model.", "data.", "train.precision", "train.optimizer")
    first, *others = ({k: v for k, v in _what_decides(run.spec).items() if k.startswith(alike)} for run in runs)
    return all(other == first for other in others)


def _what_decides(spec: RunSpec) -> dict[str, Any]:
    """The values of a spec that decide the losses of its steps."""
    same = (*SAME_ANSWER, *(LENGTHS if spec.train.schedule == "constant" and not spec.train.warmup else ()))
    return {k: v for k, v, *_ in spec.fields() if k in MUST_STAY or not k.startswith((*same, "cluster"))}
