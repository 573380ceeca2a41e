"""Diagnose where the time of a row goes, and advise what would help.

A row is compared with an ideal one: the work of the reference, divided by the ranks. The lost time is the sum of four
parts: exposed communication, waiting for a slower rank, waiting for input, and compute that did not divide.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.io.format import duration, number, percent
from paceline.measurement.rows import (
    NOISY,
    FailedRow,
    MeasuredRow,
    SlowestRank,
    drop_failed,
    find_reference,
    is_beyond_devices,
)

NOTABLE = 0.1  # smaller parts are not named
UNEVEN = 1.15  # relative to the other ranks
FEW_SAMPLES = 8


class Cause(StrEnum):
    COMMUNICATION = "communication"
    SLOW_RANK = "slow rank"
    INPUT = "input"
    SHARED_CORES = "shared cores"
    SHARED_DEVICE = "shared device"
    SMALL_PASSES = "small passes"
    FIXED_WORK = "fixed work"
    NOISE = "noise"
    IMPOSSIBLE = "impossible"
    NONE = "none"


@dataclass(frozen=True)
class Finding:
    label: str
    cause: Cause
    share: float
    text: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    row: MeasuredRow
    base: MeasuredRow
    cause: Cause
    share: float
    cores: int  # of the one machine of all ranks, or 0
    given: Mapping[str, Any]  # values of the run file, by dotted key

    @property
    def key(self) -> str:
        """Return the key of its texts in advice.json."""
        in_turn = self.cause is Cause.SLOW_RANK and not _is_uneven(self.row.loads.slowest)
        return IN_TURN if in_turn else self.cause


def diagnose(
    rows: Sequence[MeasuredRow | FailedRow], cores: int = 0, given: Mapping[str, Any] | None = None
) -> tuple[Finding, ...]:
    """Return what slows each row the most, unless its repeats are too far apart to tell."""
    base = find_reference(rows)
    return () if base is None else tuple(_diagnose_row(row, base, cores, given or {}) for row in drop_failed(rows))


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


def _diagnose_row(row: MeasuredRow, base: MeasuredRow, cores: int, given: Mapping[str, Any]) -> Finding:
    parts = split_lost_time(row, base, cores)
    if row.parts.data_s > NOTABLE * row.step_s:  # waiting for input is a loss on one rank too
        parts[Cause.INPUT] = max(parts[Cause.INPUT], row.parts.data_s)
    cause = max(parts, key=lambda cause: parts[cause])
    share = parts[cause] / row.step_s
    noise = max(row.noise, base.noise)
    if share < NOTABLE:
        cause, share = Cause.NONE, max(0.0, share)
    if is_beyond_devices(row, base):
        cause = Cause.IMPOSSIBLE
    elif noise > NOISY or (cause is not Cause.NONE and noise > share):
        cause = Cause.NOISE
    found = Diagnosis(row, base, cause, share, cores, given)
    are = "are" if row.label.endswith(" ranks") else "is"
    head = f", {duration(row.step_s)} per step" if row is base else f" {are} {number(row.speedup, 3)}×"
    text = f"{row.label}{head}: {_describe_cause(found)}{_list_other_shares(row, cause)}"
    return Finding(row.label, cause, share, text, _advise(found))


def _explain_lost_compute(row: MeasuredRow, cores: int) -> Cause:
    """Return why compute did not shrink with the ranks."""
    threads, batch = row.resources.threads, row.batch.global_batch
    if row.resources.device_ranks > 1:
        return Cause.SHARED_DEVICE
    if cores and threads and row.ranks > 1 and row.ranks * threads >= cores and row.resources.device is None:
        return Cause.SHARED_CORES
    return Cause.SMALL_PASSES if batch and count_samples_per_pass(row) <= FEW_SAMPLES else Cause.FIXED_WORK


def suggest_workers(row: MeasuredRow, cores: int) -> tuple[int, float] | None:
    """Suggest as many workers as load the samples of a step while it computes, within the cores of a rank.

    Return their number and the seconds of a step with them; None if that is not more than now, or not known.
    """
    now, load_s = row.resources.workers, row.resources.load_s
    rest_s = row.step_s - row.parts.data_s
    if now is None or not load_s or rest_s <= 0:
        return None
    enough = math.ceil(load_s / rest_s)
    workers = min(enough, max(1, cores // row.ranks)) if cores else enough
    return (workers, max(rest_s, load_s / workers)) if workers > now else None


def count_samples_per_pass(row: MeasuredRow) -> int:
    return -(-(row.batch.global_batch or 0) // (row.ranks * row.batch.passes))


IN_TURN = "in turn"  # ranks are slow one after the other
ADVICE = json.loads(Path(__file__).with_name("advice.json").read_text(encoding="utf-8"))
CAUSES: dict[str, str] = ADVICE["causes"]
FROM_OUTSIDE = "Measured from outside: the order of the data and what a resumed run does are the script's own."


def _list_other_shares(row: MeasuredRow, named: Cause) -> str:
    shares = {
        Cause.COMMUNICATION: ("exposed communication", row.parts.travelling_s),
        Cause.SLOW_RANK: ("waiting for the slowest rank", row.parts.waiting_s),
        Cause.INPUT: ("input", row.parts.data_s),
    }
    others = [shares[c] for c in shares if c is not named] if row.ranks > 1 else [shares[Cause.INPUT]]
    return f" ({', '.join(f'{name} {percent(part_s / row.step_s)}' for name, part_s in others)})"


def _describe_cause(found: Diagnosis) -> str:
    row, base, parts = found.row, found.base, found.row.parts
    threads, rate, slow = base.resources.threads or 1, row.link_bits_s(), row.loads.slowest
    grown = parts.compute_s / (base.parts.compute_s or 1.0) * base.step_s / compute_ideal_step_s(row, base)
    return CAUSES[found.key].format(
        row=row,
        others="" if row is base else f", or those of {base.label},",
        noise=percent(max(row.noise, base.noise)),
        cores=found.cores,
        slow=slow,
        times=f"{number(slow.over_others, 3)}×" if slow else "",
        growth=f"compute per sample takes {number(grown, 3)}× the time of {base.label}",
        exposed=percent(parts.travelling_s / row.step_s),
        waits=percent(parts.waiting_s / row.step_s),
        data=percent(parts.data_s / row.step_s),
        link=f", {number(rate / 1e9, 2)} Gbit/s reached" if rate else "",
        threads=f"; {base.label} had {threads} threads" if threads > 1 else "",
        samples=count_samples_per_pass(row),
    )


def _is_uneven(slow: SlowestRank | None) -> bool:
    return slow is not None and slow.over_others >= UNEVEN


def _advise(found: Diagnosis) -> str:
    """Return what would help and is possible: nothing that was done already, or that this layout or device lacks."""
    row, workers = found.row, found.row.resources.workers
    if found.cause is Cause.INPUT and workers is not None and not row.outside:
        return _advise_on_workers(found)
    kind = "command" if row.outside else "passes" if row.fits else "run"
    key = found.cause if row.fits and not row.outside else found.key
    options = ADVICE[kind].get(key) or ADVICE["run"].get(key, [])
    ddp = row.ddp if row.outside else row.batch.only_gradients
    possible = {
        "ddp": ddp,
        "hook": ddp and row.resources.device is not None,
        "reduce": ddp and found.given.get("parallel.reduce", "exact") == "exact",
        "threads": (found.base.resources.threads or 1) > 1 and not found.given.get("parallel.threads"),
        "passes": row.batch.passes > 1,
        "slower": not row.recommended,
        "record": row.resources.device is not None and found.given.get("train.compile") == "off",
        "": True,
    }
    texts = [text for option in options for need, _, text in [option.rpartition("? ")] if possible[need]]
    now = f" (now {workers})" if workers is not None else ""
    return ", or ".join(texts).format(slow=row.loads.slowest, now=now)


def _advise_on_workers(found: Diagnosis) -> str:
    row, more = found.row, suggest_workers(found.row, found.cores)
    took = f"one process takes {duration(row.resources.load_s or 0.0)} for the samples of a step"
    if more is None:
        return f"{took}, and there are no cores for more: make samples cheaper"
    typed = f"type  data.workers={more[0]}  (now {row.resources.workers})"
    return f"{typed}: {took}, which would take {duration(more[1])} at best"
