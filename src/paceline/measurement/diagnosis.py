"""Diagnose where the time of a row goes, decide which row to recommend, and put both into words.

A row is compared with an ideal one: the work of the reference, divided by the ranks. The lost time is the sum of four
parts: exposed communication, waiting for a slower rank, waiting for input, and compute that did not divide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import NamedTuple

from paceline.io.format import duration, number, percent
from paceline.measurement.rows import (
    LEAST_GAIN,
    FailedRow,
    MeasuredRow,
    RowT,
    SlowestRank,
    TimedRow,
    drop_failed,
    find_reference,
    recommend_row,
    share_cores,
)
from paceline.measurement.scaling_laws import LAWS, LawFit
from paceline.runlog.machine import BUSY

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
    if (slow := row.loads.slowest) is not None and _is_uneven(slow):
        longest = row.loads.busy_s_by_rank[slow.rank]
        compute = longest / slow.over_others - parts.data_s
        slow_s = longest - longest / slow.over_others
    return {
        Cause.COMMUNICATION: parts.travelling_s,
        Cause.SLOW_RANK: slow_s,
        Cause.INPUT: parts.data_s - base.parts.data_s * scale if row is not base else parts.data_s,
        _explain_lost_compute(row, cores): compute - base.parts.compute_s * scale,
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


def _explain_lost_compute(row: MeasuredRow, cores: int) -> Cause:
    """Return why compute did not shrink with the ranks."""
    threads, batch = row.resources.threads, row.batch.global_batch
    if row.resources.device_ranks > 1:
        return Cause.SHARED_DEVICE
    if cores and threads and row.ranks > 1 and row.ranks * threads >= cores and row.resources.device is None:
        return Cause.SHARED_CORES
    return Cause.SMALL_PASSES if batch and count_samples_per_pass(row) <= FEW_SAMPLES else Cause.FIXED_WORK


class WorkerSuggestion(NamedTuple):
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
    chosen = {RankChoice.TAKE: found.row, RankChoice.STAY: found.base}.get(found.choice) if found else None
    label = chosen.label if chosen else None
    return [row if isinstance(row, FailedRow) else replace(row, recommended=row.label == label) for row in rows]


def _is_doubtful(row: TimedRow, base: TimedRow) -> bool:
    low, high = row.scaling.speedup_low, row.scaling.speedup_high
    pays = high > PAYS * base.ranks or row.speedup >= LEAST_GAIN * base.ranks
    return (low <= base.ranks and pays) or high > CONTRADICTORY * low


def is_superlinear(row: TimedRow) -> bool:
    return row.ranks > 1 and row.scaling.speedup_low > SUPERLINEAR * row.ranks


IN_TURN = "in turn"  # ranks are slow one after the other
LEAST_COUNTS = 1 + min(law.needs for law in LAWS.values())
NOTHING_MEASURED = "Nothing could be measured."
ADVICE = json.loads(Path(__file__).with_name("advice.json").read_text(encoding="utf-8"))
CAUSES = {
    Cause.NONE: "nothing stands out",
    Cause.COMMUNICATION: "{exposed} of the step is exposed communication{link}",
    Cause.INPUT: "{data} of the step is waiting for input",
    Cause.SLOW_RANK: "rank {slow.rank} works {times} as long as the others, who wait {waits} of the step",
    IN_TURN: "ranks wait {waits} of the step, each for another in turn",
    Cause.SHARED_CORES: "{growth}: {row.ranks} ranks share {cores} cores{threads}",
    Cause.SHARED_DEVICE: "{growth}: {row.resources.device_ranks} ranks share a device and send through the host",
    Cause.SMALL_PASSES: "{growth}: {samples} samples in a pass are too few to fill a rank",
    Cause.FIXED_WORK: "{growth}: a part of it does not shrink with the batch (launches, the update)",
}
BUSY_NOTE = (
    "The machine was busy with other work: a load of {load} on {cores} cores at the start. Speed-ups compare runs that "
    "are adjacent in time, but measure again on an idle machine."
)
SUPERLINEAR_NOTE = "{times}× is more than {ranks} ranks alone can give; caches, or other work, took part in it."
FROM_OUTSIDE = "Measured from outside: the order of the data and what a resumed run does are the script's own."


@dataclass(frozen=True)
class Finding:
    label: str
    cause: Cause
    share: float
    text: str
    advice: str


def build_finding(found: Diagnosis) -> Finding:
    row, cause = found.row, found.cause
    are = "are" if row.label.endswith(" ranks") else "is"
    head = f", {duration(row.step_s)} per step" if row is found.base else f" {are} {number(row.speedup, 3)}×"
    text = f"{row.label}{head}: {_describe_cause(found)}{_list_other_shares(row, cause)}"
    return Finding(row.label, cause, found.share, text, _advise(found))


def _list_other_shares(row: MeasuredRow, named: Cause) -> str:
    parts = row.parts
    shares = {
        Cause.COMMUNICATION: ("exposed communication", parts.exposed_s - parts.waiting_s),
        Cause.SLOW_RANK: ("waiting for the slowest rank", parts.waiting_s),
        Cause.INPUT: ("input", parts.data_s),
    }
    others = [c for c in shares if c is not named] if row.ranks > 1 else [Cause.INPUT]
    return f" ({', '.join(f'{shares[c][0]} {percent(shares[c][1] / row.step_s)}' for c in others)})"


def _describe_cause(found: Diagnosis) -> str:
    row, cause, parts = found.row, found.cause, found.row.parts
    threads, rate, slow = found.base.resources.threads or 1, row.link_bits_s(), row.loads.slowest
    in_turn = cause is Cause.SLOW_RANK and not _is_uneven(slow)
    return CAUSES[IN_TURN if in_turn else cause].format(
        row=row,
        cores=found.cores,
        slow=slow,
        times=f"{number(slow.over_others, 3)}×" if slow else "",
        growth=_describe_compute_growth(found),
        exposed=percent((parts.exposed_s - parts.waiting_s) / row.step_s),
        waits=percent(parts.waiting_s / row.step_s),
        data=percent(parts.data_s / row.step_s),
        link=f", {number(rate / 1e9, 2)} Gbit/s reached" if rate else "",
        threads=f"; {found.base.label} had {threads} threads" if threads > 1 else "",
        samples=count_samples_per_pass(row),
    )


def _is_uneven(slow: SlowestRank | None) -> bool:
    return slow is not None and slow.over_others >= UNEVEN


def _describe_compute_growth(found: Diagnosis) -> str:
    row, base = found.row, found.base
    grown = row.parts.compute_s / (base.parts.compute_s or 1.0) * base.step_s / compute_ideal_step_s(row, base)
    return f"compute per sample takes {number(grown, 3)}× the time of {base.label}"


def _advise(found: Diagnosis) -> str:
    row, cause, workers = found.row, found.cause, found.row.resources.workers
    kind = "command" if row.outside else "passes" if row.fits else "run"
    if cause is Cause.INPUT and workers is not None and not row.outside:
        return _advise_on_workers(found)
    in_turn = cause is Cause.SLOW_RANK and kind != "passes" and not _is_uneven(row.loads.slowest)
    key = IN_TURN if in_turn else cause
    text = str(ADVICE[kind].get(key) or ADVICE["run"].get(key, ""))
    return text.format(slow=row.loads.slowest, now=f" (now {workers})" if workers is not None else "")


def _advise_on_workers(found: Diagnosis) -> str:
    row, more = found.row, suggest_workers(found.row, found.cores)
    took = f"one process takes {duration(row.resources.load_s or 0.0)} for the samples of a step"
    if more is None:
        return f"{took}, and there are no cores for more: make samples cheaper"
    best = duration(more.step_s)
    return f"type  data.workers={more.workers}  (now {row.resources.workers}): {took}, which would take {best} at best"


def describe_verdict(
    rows: Sequence[MeasuredRow | FailedRow], findings: Sequence[Finding], laws: Sequence[LawFit]
) -> list[str]:
    """Return the verdict as sentences: which row to take, why, and what more ranks would reach."""
    base = find_reference(rows)
    if base is None or decide_ranks(rows) is None:
        return [NOTHING_MEASURED]
    return [describe_decision(rows), _explain_verdict(base, findings), describe_extrapolation(rows, laws)]


def _explain_verdict(base: TimedRow, findings: Sequence[Finding]) -> str:
    named = [f for f in findings if f.cause is not Cause.NONE]
    others = [f for f in named if f.label != base.label] or named
    worst = max(others, key=lambda f: f.share, default=None)
    return "Why: no part of a step stands out." if worst is None else f"Why: {worst.text}."


def describe_decision(rows: Sequence[TimedRow | FailedRow]) -> str:
    found = decide_ranks(rows)
    if found is None:
        return NOTHING_MEASURED
    row, base = found.row, found.base
    if len(drop_failed(rows)) == 1:
        return f"Nothing to compare: only {base.label} {'were' if base.label.endswith('s') else 'was'} measured."
    speedups = (row.speedup, row.scaling.speedup_low, row.scaling.speedup_high)
    times, low, high = (number(speedup / base.ranks, 3) for speedup in speedups)  # relative to the base
    reach = f"{row.label} reach{'' if row.label.endswith('s') else 'es'} {times}×"
    if found.choice is RankChoice.UNDECIDED:
        return f"Not decided: {reach}, but single repeats went from {low} to {high}×; measure again with more repeats."
    if found.choice is RankChoice.TAKE:
        return f"Take {row.label}: {times}× as fast as {base.label}, {_describe_price(row, rows)}."
    also = f", {_describe_price(row, rows)}" if row.speedup > base.ranks else ""
    if base.ranks < row.speedup < LEAST_GAIN * base.ranks:
        also = f", and a gain below {percent(LEAST_GAIN - 1)} is not worth them"
    return f"Stay on {base.label}: more do not pay; {reach}{also}."


def _describe_price(row: TimedRow, rows: Sequence[TimedRow | FailedRow]) -> str:
    if share_cores(rows):
        return "on the same cores"
    cost = row.ranks / row.speedup
    return f"at {number(cost, 3)}× the device-hours" if cost > 1.005 else "at no more device-hours"


def describe_extrapolation(rows: Sequence[TimedRow | FailedRow], laws: Sequence[LawFit]) -> str:
    counts = {row.ranks for row in drop_failed(rows)}
    if not laws and len(counts) < LEAST_COUNTS:
        return f"Extrapolation: a scaling law needs {LEAST_COUNTS} numbers of ranks or more; {len(counts)} measured."
    if not laws:
        return "Beyond: no law of scaling goes through what was measured, so none is extended."
    law = laws[-1]
    point = law.beyond(2 * max(counts))
    if point is None:
        return f"Beyond: more than {law.curve[-1].ranks} ranks would share the cores of this machine."
    band = f"{number(point.low, 3)} to {number(point.high, 3)}×"
    band = band if point.high > point.low * 1.005 else f"{number(point.speedup, 3)}×"
    end = f"; the speed-up never exceeds {number(law.ceiling_high, 3)}×" if law.ceiling_high else ""
    return f"Beyond: {point.ranks} ranks would reach {band} by the law of {law.name}{end}."


def collect_notes(rows: Sequence[MeasuredRow | FailedRow], cores: int, load: float) -> list[str]:
    notes, measured = [], drop_failed(rows)
    if cores and load > BUSY * cores:
        notes.append(BUSY_NOTE.format(load=number(load, 3), cores=cores))
    threads = {row.label: row.resources.threads for row in measured if row.resources.threads}
    if len(set(threads.values())) > 1:
        by_label = ", ".join(f"{label}: {count}" for label, count in threads.items())
        paid = ", and the machine counts as one device" if share_cores(measured) else ""
        notes.append(f"Ranks shared the cores of a machine, so threads per rank differ ({by_label}){paid}.")
    for row in measured:
        if row.compiled_steps:
            steps, took = f"{row.compiled_steps} step{'s' * (row.compiled_steps > 1)}", duration(row.compiled_s)
            notes.append(f"{row.label}: {steps} of a run compiled or recorded, {took} in all; no median counts them.")
    superlinear = ((row.label, number(row.speedup, 3), row.ranks) for row in measured if is_superlinear(row))
    return notes + [f"{label}: {SUPERLINEAR_NOTE.format(times=t, ranks=n)}" for label, t, n in superlinear]
