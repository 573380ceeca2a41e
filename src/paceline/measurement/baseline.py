"""A gate for speed and answers: compare a measurement with a baseline file, beyond the noise of both."""

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.files import catch_damage, from_flat, read_json
from paceline.io.format import duration, number, percent, size
from paceline.measurement.measure import select_comparable
from paceline.measurement.progress import collect_times
from paceline.measurement.result import Measurement
from paceline.measurement.run_times import RunTimes
from paceline.trials.check import TOLERANCE
from paceline.trials.runner import check_same_request

FORMAT = 1
LEAST_SLOWER = 0.025  # of a step: less could be the state of the machine
LEAST_GROWTH, LEAST_GROWTH_BYTES = 0.02, 8 << 20  # of memory: less is the allocator's
NOISE_FACTOR = 2.0  # times the gaps between fastest repeats
TERMS = ("compute_s", "exposed_s", "data_s")


@dataclass(frozen=True)
class BaselineRow:
    """What each repeat of a row took, needed and answered."""

    step_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    loss: tuple[float | None, ...]


@dataclass(frozen=True)
class Baseline:
    format: int
    name: str
    machine: str
    request: dict[str, Any]
    rows: dict[str, BaselineRow]


@dataclass(frozen=True)
class Regression:
    """What became worse in a row: `term` is step_s, memory or loss; `cause` the part of the step that grew most."""

    label: str
    term: str
    before: float
    after: float
    limit: float  # relative change that counts as noise
    cause: str = ""

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else math.inf

    def describe(self) -> str:
        if self.term == "loss":
            return f"{self.label}: the loss changed from {number(self.before, 6)} to {number(self.after, 6)}"
        name, show = ("memory grew", size) if self.term == "memory" else ("a step became slower", duration)
        cause = f", most in {self.cause}" if self.cause else ""
        by = f"{100 * self.change:.1f} %, noise {100 * self.limit:.1f} %"
        return f"{self.label}: {name}, {show(self.before)} to {show(self.after)} ({by}){cause}"


def build_baseline(found: Measurement) -> Baseline:
    """Collect the repeats of a measurement's rows, with what another must share to be compared."""
    state = read_json(found.file)
    rows = {label: _collect_repeats(times.values()) for label, times in collect_times(state).items()}
    request = {"command": shlex.join(found.command), **select_comparable(state)}
    devices = {row.resources.device for row in found.measured if row.resources.device}
    cores = f"{found.environment.get('cores')} cores of {found.environment.get('cpu')}"
    return Baseline(FORMAT, found.name, ", ".join(sorted(devices)) or cores, request, rows)


def _collect_repeats(times: Collection[RunTimes]) -> BaselineRow:
    return BaselineRow(
        step_s=tuple(one.step_s for one in times),
        **{name: tuple(getattr(one.parts, name) for one in times) for name in TERMS},
        peak_bytes=tuple(max(one.peak_bytes_per_rank, default=0) for one in times),
        loss=tuple(one.loss_last for one in times),
    )


def read_baseline(file: Path) -> Baseline:
    values = read_json(file)
    if values.get("format") != FORMAT or "machine" not in values:
        raise UserError(f"{file} is not a baseline; write one with  --baseline NEW_FILE.json", code="invalid-format")
    with catch_damage(file):
        rows = {label: from_flat(BaselineRow, row) for label, row in values["rows"].items()}
        return Baseline(**{**values, "rows": rows})


def compare_with_baseline(file: Path, before: Baseline, now: Baseline) -> list[Regression]:
    """Return what became worse; raise UserError if the two are of different work or machines."""
    if before.machine != now.machine:
        problem = f"{file} is of {before.machine}, and this is {now.machine}; name another file to write a new one"
        raise option_error("--baseline", problem, "conflict")
    check_same_request(file, before.request, now.request, "compare")
    if missing := [label for label in before.rows if label not in now.rows]:
        raise option_error("--baseline", f"{file} has the row {missing[0]}, which was not measured now", "conflict")
    tolerance = TOLERANCE.get(str(now.request.get("train.precision")), max(TOLERANCE.values()))
    found = (_compare_rows(label, row, now.rows[label], tolerance) for label, row in before.rows.items())
    return list(chain.from_iterable(found))


def _compare_rows(label: str, before: BaselineRow, now: BaselineRow, tolerance: float) -> Iterator[Regression]:
    old, new = min(before.step_s), min(now.step_s)
    limit = max(LEAST_SLOWER, NOISE_FACTOR * (_gap(before.step_s) + _gap(now.step_s)))
    if new > old * (1 + limit):
        growth = {name: min(getattr(now, name)) - min(getattr(before, name)) for name in TERMS}
        yield Regression(label, "step_s", old, new, limit, max(growth, key=lambda name: growth[name]))
    held, holds = max(before.peak_bytes), max(now.peak_bytes)
    spread = held - min(before.peak_bytes) + holds - min(now.peak_bytes)
    most = max(LEAST_GROWTH * held, LEAST_GROWTH_BYTES, spread)
    if holds > held + most:
        yield Regression(label, "memory", held, holds, most / held if held else 0.0)
    yield from _compare_losses(label, before.loss, now.loss, tolerance)


def _gap(repeats: Sequence[float]) -> float:
    """Return how far the second fastest repeat lies behind the fastest: other work only ever slows a run down."""
    fastest, *others = sorted(repeats)
    return others[0] / fastest - 1 if others else 0.0


def _compare_losses(
    label: str, before: Sequence[float | None], now: Sequence[float | None], tolerance: float
) -> Iterator[Regression]:
    old, new = ([value for value in values if value is not None] for values in (before, now))
    if not old or not new:
        return
    scale = max(abs(old[0]), 1e-12)
    limit = max(tolerance, (max(old) - min(old)) / scale, (max(new) - min(new)) / scale)
    if abs(new[0] - old[0]) > limit * scale or math.isnan(new[0]) != math.isnan(old[0]):
        yield Regression(label, "loss", old[0], new[0], limit)


def describe_comparison(file: Path, found: Sequence[Regression], before: Baseline, now: Baseline) -> Iterator[str]:
    """Yield the verdict first, then each row's change."""
    yield f"Worse than {file}:" if found else f"No worse than {file}."
    yield from (f"  {regression.describe()}" for regression in found)
    for label, row in before.rows.items():
        old, new = row.step_s, now.rows[label].step_s
        change = 100 * (min(new) / min(old) - 1)
        yield f"  {label}: step {duration(min(new))} ({change:+.1f} %), noise {percent(_gap(old) + _gap(new))}"
