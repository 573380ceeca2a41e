"""Decide which row to recommend, and put the decision, its reason and what to type into words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from paceline.io.format import duration, number, percent, plural
from paceline.measurement.diagnosis import Cause, Finding
from paceline.measurement.rows import (
    FEW_RETURNS,
    LEAST_GAIN,
    LEAST_NOISE,
    NOISY,
    FailedRow,
    MeasuredRow,
    RowT,
    TimedRow,
    change_rows,
    compute_marginal_speedup,
    count_devices,
    drop_failed,
    find_reference,
    is_beyond_devices,
    recommend_row,
    share_cores,
)
from paceline.measurement.scaling_laws import LawFit
from paceline.runlog.machine import MachineLoad

PAYS = 1.2  # of a single repeat
CONTRADICTORY = 2.0  # highest / lowest repeat
NOTHING_MEASURED = "Nothing could be measured."


class RankChoice(Enum):
    TAKE = auto()
    STAY = auto()
    UNDECIDED = auto()  # repeats contradict each other
    IMPOSSIBLE = auto()  # a speed-up is beyond what the devices can give


@dataclass(frozen=True)
class Decision:
    choice: RankChoice
    row: TimedRow  # to take, to measure again, or the fastest
    base: TimedRow


def decide_ranks(rows: Sequence[TimedRow | FailedRow]) -> Decision | None:
    measured, base = drop_failed(rows), find_reference(rows)
    if base is None:
        return None
    others = [row for row in measured if row is not base]
    if beyond := [row for row in others if is_beyond_devices(row, base)]:
        return Decision(RankChoice.IMPOSSIBLE, max(beyond, key=lambda row: row.efficiency), base)
    best = recommend_row(measured)
    if best is None:
        return None
    doubtful = [row for row in others if _is_doubtful(row, base)]
    if doubtful and (best is base or best in doubtful):
        again = best if best in doubtful else max(doubtful, key=lambda row: row.scaling.speedup_high)
        return Decision(RankChoice.UNDECIDED, again, base)
    if best is base or best.speedup <= base.ranks:
        return Decision(RankChoice.STAY, max(others, key=lambda row: row.speedup, default=base), base)
    return Decision(RankChoice.TAKE, best, base)


def _is_doubtful(row: TimedRow, base: TimedRow) -> bool:
    low, high = row.scaling.speedup_low, row.scaling.speedup_high
    pays = high > PAYS * base.ranks or row.speedup >= LEAST_GAIN * base.ranks
    return (low <= base.ranks and pays) or high > CONTRADICTORY * low or max(row.noise, base.noise) > NOISY


def mark_recommended(rows: Sequence[RowT | FailedRow]) -> list[RowT | FailedRow]:
    found = decide_ranks(rows)
    chosen = {RankChoice.TAKE: found.row, RankChoice.STAY: found.base}.get(found.choice) if found else None
    label = chosen.label if chosen else None
    return change_rows(rows, lambda row: replace(row, recommended=row.label == label))


def describe_verdict(
    rows: Sequence[MeasuredRow | FailedRow],
    findings: Sequence[Finding],
    laws: Sequence[LawFit],
    machine: MachineLoad | None = None,
) -> list[str]:
    """Return the verdict as sentences: which row to take, why, what to change, and what more ranks would reach."""
    found = decide_ranks(rows)
    decision = describe_decision(rows, machine)
    if found is None or found.choice is RankChoice.IMPOSSIBLE:
        return [decision]
    cause = next((f for f in findings if f.label == found.row.label and f.cause is not Cause.NONE), None)
    why = "Why: no part of a step stands out." if cause is None else f"Why: {cause.text}."
    advice = [f"To change it: {cause.advice}."] if cause is not None and cause.advice else []
    return [decision, why, *advice, *describe_extrapolation(rows, laws)]


def describe_decision(rows: Sequence[TimedRow | FailedRow], machine: MachineLoad | None = None) -> str:
    found = decide_ranks(rows)
    if found is None:
        return NOTHING_MEASURED
    row, base = found.row, found.base
    if len(drop_failed(rows)) == 1:
        return f"Nothing to compare: only {base.label} {'were' if base.label.endswith('s') else 'was'} measured."
    speedups = (row.speedup, row.scaling.speedup_low, row.scaling.speedup_high)
    times, low, high = (number(speedup / base.ranks, 3) for speedup in speedups)  # relative to the base
    reach = f"{row.label} reach{'' if row.label.endswith('s') else 'es'} {times}×"
    measured = isinstance(row, MeasuredRow) and row.runs  # not plain runs, or times of a table
    again = f"measure again with  --repeats {max(5, 2 * row.repeats)}" if measured else "run each several times"
    match found.choice:
        case RankChoice.IMPOSSIBLE:
            devices = count_devices(row, base)
            most, on = number(devices / base.ranks, 3), f" on {devices} cores" * (devices < row.ranks)
            reason = _explain_impossible(row, base, machine or MachineLoad())
            return f"No verdict: {reach}, and {row.ranks}{on} can give {most}× at most; likely {reason}; {again}."
        case RankChoice.UNDECIDED:
            return f"Not decided: {reach}, but single repeats went from {low} to {high}×; {again}."
        case RankChoice.TAKE:
            return f"Take {row.label}: {times}× as fast as {base.label}, {_describe_price(row, rows)}."
    also = f", {_describe_price(row, rows)}" if row.speedup > base.ranks else ""
    if base.ranks < row.speedup < LEAST_GAIN * base.ranks:
        also = f", and a gain below {percent(LEAST_GAIN - 1)} is not worth them"
    return f"Stay on {base.label}: more do not pay; {reach}{also}."


def _explain_impossible(row: TimedRow, base: TimedRow, machine: MachineLoad) -> str:
    measured = [each for each in (row, base) if isinstance(each, MeasuredRow)]
    if any(each.outside and not each.batch.global_batch for each in measured):
        return "the rows had different samples: how many are in a step of this script is not known"
    if machine.busy or max(row.noise, base.noise) > LEAST_NOISE or row.repeats == 1:
        return "other work had the machine" + (f" ({machine})" if machine.busy else " for a while")
    return f"{base.label} had too little cache or memory, or the rows did different work"


def _describe_price(row: TimedRow, rows: Sequence[TimedRow | FailedRow]) -> str:
    if share_cores(rows):
        return "on the same cores"
    cost = row.ranks / row.speedup
    return f"at {number(cost, 3)}× the device-hours" if cost > 1.005 else "at no more device-hours"


def describe_returns(rows: Sequence[TimedRow | FailedRow]) -> list[str]:
    """Return from where on each further device adds little; nothing if all of them pay."""
    measured = drop_failed(rows)
    added = [(row, compute_marginal_speedup(row, measured[:place])) for place, row in enumerate(measured)]
    few = next(((row, adds) for row, adds in added if adds is not None and adds < FEW_RETURNS), None)
    if few is None or few[1] <= 0:
        return []
    return [f"Returns diminish at {few[0].label}: each further one adds {number(few[1], 2)} of a device."]


def describe_extrapolation(rows: Sequence[TimedRow | FailedRow], laws: Sequence[LawFit]) -> list[str]:
    """Return what twice as many ranks would reach by the law that was fitted; nothing without one."""
    if not laws:
        return []
    law = laws[-1]
    point = law.beyond(2 * max(row.ranks for row in drop_failed(rows)))
    if point is None:
        return [f"Beyond: more than {law.curve[-1].ranks} ranks would share the cores of this machine."]
    wide = point.high > point.low * 1.005
    band = f"{number(point.low, 3)} to {number(point.high, 3)}×" if wide else f"{number(point.speedup, 3)}×"
    end = f"; the speed-up never exceeds {number(law.ceiling_high, 3)}×" if law.ceiling_high else ""
    return [f"Beyond: {point.ranks} ranks would reach {band} by the law of {law.name}{end}."]


def collect_notes(rows: Sequence[MeasuredRow | FailedRow], machine: MachineLoad) -> list[str]:
    notes, measured, found = [], drop_failed(rows), decide_ranks(rows)
    if machine.busy and (found is None or found.choice is not RankChoice.IMPOSSIBLE):  # else the verdict has it
        notes.append(f"The machine was busy with other work, {machine} at the start: measure again when it is idle.")
    threads = {row.label: row.resources.threads for row in measured if row.resources.threads}
    if len(set(threads.values())) > 1:
        by_label = ", ".join(f"{label}: {count}" for label, count in threads.items())
        paid = ", and the machine counts as one device" if share_cores(measured) else ""
        notes.append(f"Ranks shared the cores of a machine, so threads per rank differ ({by_label}){paid}.")
    for row in measured:
        if row.compiled_steps:
            steps, took = plural(row.compiled_steps, "step"), duration(row.compiled_s)
            notes.append(f"{row.label}: {steps} of a run compiled or recorded, {took} in all; no median counts them.")
    return notes
