"""Plan and measurement side by side: the planner prices the very layout that was measured, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.measuring.rows import FailedRow, MeasuredRow, done
from paceline.spec import RunSpec

ASSUMPTIONS = {
    "compute_s": "the arithmetic rate of a rank",
    "exposed_s": "the rate of the link, or how much of it compute hides",
    "data_s": "the rate of the input",
}
OFF = 0.1
"""Of the measured step: a term that is off by less is not named."""


@dataclass(frozen=True)
class Planned:
    """A row as it was foreseen, in the terms that were measured."""

    label: str
    step_s: float
    data_s: float
    compute_s: float
    """With the update and the launches around it: the loop does not tell them apart."""
    comm_s: float
    exposed_s: float
    """With waiting for the slowest rank."""
    memory_bytes: float
    """As the peak is measured: of the process on cores, of torch's allocator on a device."""
    speedup: float | None
    calibrated: bool
    residual: float
    """MeasuredRow step over planned, less 1."""
    off: str
    """The term that is most to blame, and the assumption behind it; empty where the plan was right."""


def compare(rows: Sequence[MeasuredRow | FailedRow], specs: Mapping[str, RunSpec]) -> list[Planned]:
    """Each measured row beside its plan. Nothing where there is no plan."""
    measured = [row for row in done(rows) if row.label in specs]
    try:
        return _compare(measured, specs) if measured else []
    except PacelineError:
        return []


def _compare(measured: Sequence[MeasuredRow], specs: Mapping[str, RunSpec]) -> list[Planned]:
    from paceline.planning.subject import subject_of

    site = _site(measured, specs)
    planned: list[Planned] = []
    alone: float | None = None
    for row in measured:
        spec = specs[row.label]
        subject = subject_of(spec)
        try:
            where = site.at(row.ranks)
        except PacelineError:
            continue
        found = price_of(spec, subject, where)
        if alone is None and row.ranks == 1:
            alone = found.samples_s
        calibrated = bool(site.calibrated) or not site.shared
        planned.append(_planned(row, found, found.samples_s / alone if alone else None, calibrated))
    return planned


def _site(measured: Sequence[MeasuredRow], specs: Mapping[str, RunSpec]) -> Any:
    """Where the rows were measured. A container may hide its devices from the planner, but not from the run."""
    from paceline.hardware.catalogue import known
    from paceline.planning.site import site_of

    site = site_of(specs[measured[0].label].cluster)
    device = measured[0].resources.device
    kind = known(device) if site.shared and device else None
    return site if kind is None else site_of(f"{max(row.ranks for row in measured)}x{kind.name}")


def price_of(spec: RunSpec, subject: Any, where: Any) -> Any:
    """The layout of the run file, as the planner prices it."""
    return subject.price(subject.layout(spec), where)


def terms_of(time: Any) -> dict[str, float]:
    """A planned step in the terms that are measured."""
    return {
        "data_s": time.data_s,
        "compute_s": time.compute_s + time.update_s + time.overhead_s + time.bubble_s + time.offload_s,
        "exposed_s": time.exposed_s + time.waiting_s,
    }


def _planned(row: MeasuredRow, found: Any, speedup: float | None, calibrated: bool) -> Planned:
    time, memory, on_cores = found.time, found.memory, found.where.cluster.device.synchronous
    terms = terms_of(time)
    off = {name: getattr(row.parts, name) - value for name, value in terms.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    return Planned(
        label=row.label,
        step_s=found.step_s,
        **terms,
        comm_s=time.comm_s,
        memory_bytes=memory.total_bytes if on_cores else memory.allocated_bytes,
        speedup=speedup,
        calibrated=calibrated,
        residual=row.step_s / found.step_s - 1,
        off=_off_text(worst, off[worst]) if abs(off[worst]) > OFF * row.step_s else "",
    )


def _off_text(term: str, seconds: float) -> str:
    more = "more" if seconds > 0 else "less"
    return f"{term} is {abs(seconds) * 1e3:.3g} ms {more} than planned: {ASSUMPTIONS[term]}"
