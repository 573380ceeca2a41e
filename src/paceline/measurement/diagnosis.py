"""Diagnose where the time of a row goes, and decide which row to recommend.

A row is compared with an ideal one: the work of the reference, divided by the ranks. The lost time is the sum of four
parts: exposed communication, waiting for a slower rank, waiting for input, and compute that did not divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from paceline.measurement.rows import (
    LEAST_GAIN,
    FailedRow,
    MeasuredRow,
    RowT,
    TimedRow,
    drop_failed,
    find_reference,
    recommend_row,
)

NOTABLE = 0.1  # smaller parts are not named
UNEVEN = 1.15  # relative to the other ranks
FEW_SAMPLES = 8
PAYS = 1.2  # of a single repeat
CONTRADICTORY = 2.0  # highest / lowest repeat
SUPERLINEAR = 1.05  # speed-up / ranks


class Cause(StrEnum):
    COMMUNICATION = "communication"
    SLOW_RANK = "slow rank"
    INPUT = "input"
    SHARED_CORES = "shared cores"
    SHARED_DEVICE = "shared device"
    SMALL_PASSES = "small passes"
    FIXED_WORK = "fixed work"
    NONE = "none"


@dataclass(frozen=True)
class Diagnosis:
    row: MeasuredRow
    base: MeasuredRow
    cause: Cause
    share: float
    cores: int  # of the one machine of all ranks, or 0


def diagnose(rows: Sequence[MeasuredRow | FailedRow], cores: int = 0) -> list[Diagnosis]:
    base = find_reference(rows)
    return [] if base is None else [_diagnose_row(row, base, cores) for row in drop_failed(rows)]


def split_lost_time(row: MeasuredRow, base: MeasuredRow, cores: int = 0) -> dict[Cause, float]:
    """Return the seconds of a step beyond the ideal, by cause.

    If one rank is slower than the rest, the compute of the rest counts as compute, and what it has more as slow rank.
    """
    scale = compute_ideal_step_s(row, base) / base.step_s
    parts = row.parts
    compute, slow_s = parts.compute_s, parts.waiting_s
    slow = row.loads.slowest
    if slow is not None and slow.over_others >= UNEVEN:
        longest = row.loads.busy_s_by_rank[slow.rank]
        compute = longest / slow.over_others - parts.data_s
        slow_s = longest - longest / slow.over_others
    return {
        Cause.COMMUNICATION: parts.travelling_s,
        Cause.SLOW_RANK: slow_s,
        Cause.INPUT: parts.data_s - base.parts.data_s * scale if row is not base else parts.data_s,
        _find_compute_cause(row, cores): compute - base.parts.compute_s * scale,
    }


def compute_ideal_step_s(row: MeasuredRow, base: MeasuredRow) -> float:
    own, alone = row.batch.global_batch, base.batch.global_batch
    return base.step_s * (own / alone if own and alone else 1.0) * base.ranks / row.ranks


def _diagnose_row(row: MeasuredRow, base: MeasuredRow, cores: int) -> Diagnosis:
    parts = split_lost_time(row, base, cores)
    if row.parts.data_s > NOTABLE * row.step_s:  # waiting for input is a loss on one rank too
        parts[Cause.INPUT] = max(parts[Cause.INPUT], row.parts.data_s)
    cause = max(parts, key=lambda cause: parts[cause])
    share = parts[cause] / row.step_s
    if share < NOTABLE:
        cause, share = Cause.NONE, max(0.0, share)
    return Diagnosis(row, base, cause, share, cores)


def _find_compute_cause(row: MeasuredRow, cores: int) -> Cause:
    threads, batch = row.resources.threads, row.batch.global_batch
    if row.resources.device_ranks > 1:
        return Cause.SHARED_DEVICE
    if cores and threads and row.ranks > 1 and row.ranks * threads >= cores and row.resources.device is None:
        return Cause.SHARED_CORES
    return Cause.SMALL_PASSES if batch and count_samples_per_pass(row) <= FEW_SAMPLES else Cause.FIXED_WORK


@dataclass(frozen=True)
class WorkerSuggestion:
    workers: int
    step_s: float


def suggest_workers(row: MeasuredRow, cores: int) -> WorkerSuggestion | None:
    """Suggest as many workers as load the samples of a step while it computes, within the cores of a rank.

    None if that is not more than now, or not known.
    """
    now, load_s = row.resources.workers, row.resources.load_s
    rest_s = row.step_s - row.parts.data_s
    if now is None or not load_s or rest_s <= 0:
        return None
    enough = math.ceil(load_s / rest_s)
    workers = min(enough, max(1, cores // row.ranks)) if cores else enough
    return WorkerSuggestion(workers, max(rest_s, load_s / workers)) if workers > now else None


def count_samples_per_pass(row: MeasuredRow) -> int:
    return -(-(row.batch.global_batch or 0) // (row.ranks * row.batch.passes))


class RankChoice(Enum):
    TAKE = auto()
    STAY = auto()
    UNDECIDED = auto()


@dataclass(frozen=True)
class Decision:
    choice: RankChoice
    row: TimedRow  # to take, to measure again, or the fastest
    base: TimedRow


def decide_ranks(rows: Sequence[TimedRow | FailedRow]) -> Decision | None:
    measured, base = drop_failed(rows), find_reference(rows)
    best = recommend_row(measured)
    if base is None or best is None:
        return None
    doubtful = [row for row in measured if row is not base and _is_doubtful(row, base)]
    if doubtful and (best is base or best in doubtful):
        again = best if best in doubtful else max(doubtful, key=lambda row: row.scaling.speedup_high)
        return Decision(RankChoice.UNDECIDED, again, base)
    if best is base or best.speedup <= base.ranks:
        others = (row for row in measured if row is not base)
        return Decision(RankChoice.STAY, max(others, key=lambda row: row.speedup, default=base), base)
    return Decision(RankChoice.TAKE, best, base)


def mark_recommended(rows: Sequence[RowT | FailedRow]) -> list[RowT | FailedRow]:
    found = decide_ranks(rows)
    chosen = {RankChoice.TAKE: found.row, RankChoice.STAY: found.base}.get(found.choice) if found is not None else None
    label = chosen.label if chosen is not None else None
    return [row if isinstance(row, FailedRow) else replace(row, recommended=row.label == label) for row in rows]


def _is_doubtful(row: TimedRow, base: TimedRow) -> bool:
    low, high = row.scaling.speedup_low, row.scaling.speedup_high
    pays = high > PAYS * base.ranks or row.speedup >= LEAST_GAIN * base.ranks
    return (low <= base.ranks and pays) or high > CONTRADICTORY * low


def is_superlinear(row: TimedRow) -> bool:
    return row.ranks > 1 and row.scaling.speedup_low > SUPERLINEAR * row.ranks
