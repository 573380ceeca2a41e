"""What the planner knows of measured rows: the price of the very layout, term by term, and the share of the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
PEAK_OF = {"fp8": "bf16"}
"""fp8 is held against the peak of bf16, in which all but the products of layers are computed."""


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
    from paceline.planning.subject import subject_of

    measured = [row for row in done(rows) if row.label in specs]
    planned: list[Planned] = []
    alone: float | None = None
    try:
        site: Any = _site(measured, specs) if measured else None
        for row in measured:
            subject = subject_of(specs[row.label])
            try:
                where = site.at(row.ranks)
            except PacelineError:
                continue
            found = subject.price(subject.layout(specs[row.label]), where)
            if alone is None and row.ranks == 1:
                alone = found.samples_s
            calibrated = bool(site.calibrated) or not site.shared
            planned.append(_planned(row, found, found.samples_s / alone if alone else None, calibrated))
    except PacelineError:
        return []
    return planned


def _site(measured: Sequence[MeasuredRow], specs: Mapping[str, RunSpec]) -> Any:
    """Where the rows were measured. A container may hide its devices from the planner, but not from the run."""
    from paceline.hardware.catalogue import known
    from paceline.planning.site import site_of

    site = site_of(specs[measured[0].label].cluster)
    device = measured[0].resources.device
    kind = known(device) if site.shared and device else None
    return site if kind is None else site_of(f"{max(row.ranks for row in measured)}x{kind.name}")


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
    differences = {name: getattr(row.parts, name) - value for name, value in terms.items()}
    worst = max(differences, key=lambda name: abs(differences[name]))
    off_s, off = differences[worst], ""
    if abs(off_s) > OFF * row.step_s:
        more = "more" if off_s > 0 else "less"
        off = f"{worst} is {abs(off_s) * 1e3:.3g} ms {more} than planned: {ASSUMPTIONS[worst]}"
    return Planned(
        label=row.label,
        step_s=found.step_s,
        **terms,
        comm_s=time.comm_s,
        memory_bytes=memory.total_bytes if on_cores else memory.allocated_bytes,
        speedup=speedup,
        calibrated=calibrated,
        residual=row.step_s / found.step_s - 1,
        off=off,
    )


def with_mfu(rows: Sequence[MeasuredRow | FailedRow], specs: Mapping[str, RunSpec]) -> list[MeasuredRow | FailedRow]:
    """Rows with the share of their devices' peak that the arithmetic of the model reaches, where both are known."""
    return [
        replace(row, resources=replace(row.resources, mfu=_mfu(row, specs[row.label])))
        if isinstance(row, MeasuredRow) and row.label in specs
        else row
        for row in rows
    ]


def _mfu(row: MeasuredRow, spec: RunSpec) -> float | None:
    from paceline.hardware.catalogue import known
    from paceline.planning.subject import subject_of

    kind = known(row.resources.device) if row.resources.device else None
    peak = kind.flops_s.get(PEAK_OF.get(spec.train.precision, spec.train.precision)) if kind is not None else None
    if not peak or not row.batched:
        return None
    try:
        return subject_of(spec).flops_per_sample * row.samples_per_s / row.ranks / peak
    except PacelineError:
        return None
