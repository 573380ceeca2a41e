"""The CUDA devices of a row: the share of their peak that they reach, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.measuring.rows import FailedRow, MeasuredRow, Resources
from paceline.record.units import number, percent, size
from paceline.spec import RunSpec

HEAD = ("device", "MFU", "busy", "in use")
PEAK_OF = {"fp8": "bf16"}
"""fp8 is held against the peak of bf16, in which all but the products of layers are computed."""


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


def cells(used_by: Resources, unknown: str) -> tuple[str, ...]:
    """What a row used, under `HEAD`."""
    share, used = used_by.usage.get("device_share"), used_by.usage.get("device_bytes")
    return (
        used_by.device or unknown,
        f"{number(100 * used_by.mfu, 3)} %" if used_by.mfu is not None else unknown,
        percent(share) if share is not None else unknown,
        size(used) if used is not None else unknown,
    )
