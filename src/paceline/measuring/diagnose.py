"""Why a row is as fast as it is, in plain words with numbers, and what to change.

A row is held against an ideal one: the work of the reference, divided by the ranks. What is lost has four parts, which
add up: communication that nothing hides, waiting for a slower rank, waiting for input, and compute that did not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measuring.rows import Row, reference
from paceline.measuring.scaling import Fit
from paceline.record.units import duration, number, percent

NOTABLE = 0.1
"""Of a step: a part that is smaller is not named as a cause."""
UNEVEN = 1.15
"""A rank that works so many times as long as the others is named."""
FEW_SAMPLES = 8
PAYS = 1.2
"""A speed-up beyond doubt."""
GRADIENT_BYTES = 4.0


@dataclass(frozen=True)
class Finding:
    label: str
    cause: str
    """communication, slow rank, input, shared cores, small passes, fixed work, or none."""
    share: float
    """Of the step."""
    text: str
    advice: str


def diagnose(rows: Sequence[Row], cores: int = 0) -> list[Finding]:
    """One finding for each row that was measured, the heaviest cause first named."""
    base = reference(rows)
    if base is None:
        return []
    return [_of(row, base, cores) for row in rows if row.step_s]


def lost(row: Row, base: Row) -> dict[str, float]:
    """Seconds of a step of this row beyond the ideal, by part.

    Where one rank is slower than the rest, the compute that counts is that of the rest; the remainder is its own.
    """
    scale = ideal_s(row, base) / (base.step_s or 1.0)
    waiting, compute, slow_s = row.waiting_s or 0.0, row.compute_s or 0.0, row.waiting_s or 0.0
    if (slow := row.slowest_rank) is not None and slow[1] >= UNEVEN:
        longest = row.busy_s_by_rank[slow[0]]
        compute = longest / slow[1] - (row.data_s or 0.0)
        slow_s = longest - longest / slow[1]
    return {
        "communication": max(0.0, (row.exposed_s or 0.0) - waiting),
        "slow rank": slow_s,
        "input": (row.data_s or 0.0) - (base.data_s or 0.0) * scale if row is not base else row.data_s or 0.0,
        "compute": compute - (base.compute_s or 0.0) * scale,
    }


FIT_ADVICE = {
    "communication": "use fewer ranks, or fewer terms (k × terms sums travel in each pass)",
    "slow rank": "look at its device and host, and at the lengths of its documents: ranks get equal numbers of them",
    "input": "convert the counts to compact shards, or give each rank memory to keep its own",
    "small passes": "use fewer ranks: these are few documents",
    "fixed work": "use fewer ranks: topics and sums take as long on each of them, whatever its documents",
}
"""Where a topic model is fitted, in place of what helps training."""


def ideal_s(row: Row, base: Row) -> float:
    """The step of the reference, divided by the ranks and multiplied by the batch."""
    batch = (row.global_batch or 1) / (base.global_batch or 1) if row.global_batch and base.global_batch else 1.0
    return (base.step_s or 0.0) * batch * base.ranks / row.ranks


def _of(row: Row, base: Row, cores: int) -> Finding:
    assert row.step_s is not None
    parts = lost(row, base)
    if (row.data_s or 0.0) > NOTABLE * row.step_s:  # waiting for input is a loss on one rank too
        parts["input"] = max(parts["input"], row.data_s or 0.0)
    cause = max(parts, key=lambda name: parts[name])
    share = parts[cause] / row.step_s
    if share < NOTABLE:
        return Finding(row.label, "none", max(0.0, share), f"{_head(row, base)}: nothing stands out{_rest(row)}", "")
    said, advice = {
        "communication": _communication,
        "slow rank": _slow_rank,
        "input": _input,
        "compute": lambda row, base: _compute(row, base, cores),
    }[cause](row, base)
    name = _compute_cause(row, cores) if cause == "compute" else cause
    advice = FIT_ADVICE.get(name, advice) if row.fits else advice
    return Finding(row.label, name, share, f"{_head(row, base)}: {said}{_rest(row, cause)}", advice)


def _head(row: Row, base: Row) -> str:
    if row is base or row.speedup is None:
        return f"{row.label}, {duration(row.step_s or 0.0)} per step"
    are = "are" if row.label.endswith(" ranks") else "is"
    return f"{row.label} {are} {number(row.speedup, 3)}×"


def _rest(row: Row, cause: str = "") -> str:
    shares = {
        "communication": ("exposed communication", (row.exposed_s or 0.0) - (row.waiting_s or 0.0)),
        "slow rank": ("waiting for the slowest rank", row.waiting_s or 0.0),
        "input": ("input", row.data_s or 0.0),
    }
    told = [f"{name} {percent(s / (row.step_s or 1))}" for key, (name, s) in shares.items() if key != cause]
    return f" ({', '.join(told)})" if row.ranks > 1 else f" (input {percent((row.data_s or 0) / (row.step_s or 1))})"


def _communication(row: Row, base: Row) -> tuple[str, str]:
    exposed = (row.exposed_s or 0.0) - (row.waiting_s or 0.0)
    rate = link_bits_s(row)
    link = f", {number(rate / 1e9, 2)} Gbit/s reached" if rate else ""
    said = f"{percent(exposed / (row.step_s or 1))} of the step is exposed communication{link}"
    return said, (
        "send less (parallel.reduce=bf16, or powersgd), compute more per exchange (a larger train.global_batch), "
        "or use fewer ranks"
    )


def _slow_rank(row: Row, base: Row) -> tuple[str, str]:
    slow = row.slowest_rank
    if slow is None or slow[1] < UNEVEN:
        said = f"ranks wait {percent((row.waiting_s or 0.0) / (row.step_s or 1))} of the step, each for another in turn"
        return said, "look for what else runs on these machines; nothing here is slower than the rest all the time"
    said = (
        f"rank {slow[0]} works {number(slow[1], 3)}× as long as the others, who wait "
        f"{percent((row.waiting_s or 0.0) / (row.step_s or 1))} of the step"
    )
    return said, f"look at the device and the host of rank {slow[0]}, and at cost() of the samples"


def _input(row: Row, base: Row) -> tuple[str, str]:
    said = f"{percent((row.data_s or 0.0) / (row.step_s or 1))} of the step is waiting for input"
    return said, "make batch() of the data cheaper: prepare the samples once, keep them in memory or memory-mapped"


def _compute_cause(row: Row, cores: int) -> str:
    if _crowded(row, cores):
        return "shared cores"
    return "small passes" if _per_pass(row) <= FEW_SAMPLES else "fixed work"


def _compute(row: Row, base: Row, cores: int) -> tuple[str, str]:
    grown = (row.compute_s or 0.0) / (base.compute_s or 1.0) * (base.step_s or 1.0) / (ideal_s(row, base) or 1.0)
    said = f"compute per sample takes {number(grown, 3)}× the time of {base.label}"
    if _crowded(row, cores):
        threads = base.threads or 1
        had = f"; {base.label} had {threads} threads" if threads > 1 else ""
        return (
            f"{said}: {row.ranks} ranks share {cores} cores{had}",
            "ranks on one machine only pay where each has cores or a device of its own; "
            "to count a core as a device, measure with parallel.threads=1",
        )
    if _per_pass(row) <= FEW_SAMPLES:
        return (
            f"{said}: {_per_pass(row)} samples in a pass are too few to fill a rank",
            "use a larger train.global_batch, a larger parallel.micro_batch, or fewer ranks",
        )
    return (
        f"{said}: a part of it does not shrink with the batch (launches, the update)",
        "give each rank more samples, or on a CUDA device let train.compile=auto record the step",
    )


def _crowded(row: Row, cores: int) -> bool:
    return bool(cores and row.threads and row.ranks > 1 and row.ranks * row.threads >= cores and row.device is None)


def _per_pass(row: Row) -> int:
    return -(-(row.global_batch or 0) // (row.ranks * row.passes)) if row.global_batch else 1 << 30


def link_bits_s(row: Row) -> float | None:
    """Bits per second through each rank's link, where plain gradients travel by ring all-reduce."""
    flight = (row.comm_s or 0.0) - (row.waiting_s or 0.0)
    if row.fits or not row.parameters or flight <= 0 or row.ranks < 2 or "tensor" in row.layout:
        return None
    return 8 * 2 * (row.ranks - 1) / row.ranks * row.parameters * GRADIENT_BYTES / flight


def verdict(rows: Sequence[Row], findings: Sequence[Finding], found: Sequence[Fit]) -> list[str]:
    """Three lines: does it pay, why, and what would more ranks do."""
    base = reference(rows)
    best = next((row for row in rows if row.recommended), None)
    if base is None or best is None:
        return ["Nothing could be measured."]
    lines = [_pays(rows, base, best)]
    others = [f for f in findings if f.cause != "none" and f.label != base.label] or [
        f for f in findings if f.cause != "none"
    ]
    worst = max(others, key=lambda f: f.share, default=None)
    if worst is None:
        lines.append("Why: no part of a step stands out.")
    else:
        lines.append(f"Why: {worst.text}.")
    lines.append(_further(found, rows))
    return lines


def _pays(rows: Sequence[Row], base: Row, best: Row) -> str:
    most = max((row for row in rows if row.speedup is not None), key=lambda row: row.ranks)
    doubtful = [row for row in rows if row is not base and _doubtful(row, base)]
    if doubtful and (best is base or best in doubtful):
        row = best if best in doubtful else max(doubtful, key=lambda row: row.speedup_high or 0.0)
        return (
            f"Not decided: {row.label} reach{_es(row)} {number(row.speedup, 3)}×, but single repeats went from "
            f"{number(row.speedup_low, 3)} to {number(row.speedup_high, 3)}×; measure again with more repeats."
        )
    if best is base or (best.speedup or 0) <= base.ranks:
        also = f"; {most.label} reach{_es(most)} {number(most.speedup, 3)}×" if most is not base else ""
        return f"Stay on {base.label}: more do not pay{also}."
    cost = (best.ranks / base.ranks) / ((best.speedup or 1) / base.ranks)
    price = f"at {number(cost, 3)}× the device-hours" if cost > 1.005 else "at no more device-hours"
    return f"Take {best.label}: {number(best.speedup, 3)}× as fast as {base.label}, {price}."


def _doubtful(row: Row, base: Row) -> bool:
    """Whether some repeats say that a row pays, and others that it does not."""
    if row.speedup_low is None or row.speedup_high is None:
        return False
    return row.speedup_low <= base.ranks and row.speedup_high > PAYS * base.ranks


def _es(row: Row) -> str:
    return "" if row.label.endswith("s") else "es"


def notes(rows: Sequence[Row], cores: int, load: float) -> list[str]:
    """What a reader should know before believing the numbers."""
    found = []
    if cores and load > 1.25 * cores:
        found.append(
            f"The machine was busy with other work: a load of {number(load, 3)} on {cores} cores when this began. "
            "Ratios are of neighbours in time, but measure again when it is quiet."
        )
    threads = {row.threads for row in rows if row.threads}
    if len(threads) > 1:
        told = ", ".join(f"{row.label}: {row.threads}" for row in rows if row.threads)
        found.append(f"Ranks shared the cores of a machine, so threads per rank differ ({told}).")
    return found + [
        f"{row.label}: {number(row.speedup, 3)}× is more than {row.ranks} ranks can give by themselves; caches, or "
        "other work on the machine, took part in it."
        for row in rows
        if row.speedup_low is not None and row.ranks > 1 and row.speedup_low > 1.05 * row.ranks
    ]


def _further(found: Sequence[Fit], rows: Sequence[Row]) -> str:
    if not found:
        return "Beyond: measure more than one number of ranks to see where it leads."
    fit = found[-1]
    most = max((row.ranks for row in rows if row.speedup is not None), default=1)
    ranks, middle, low, high = next(point for point in fit.curve if point[0] >= 2 * most)
    band = f"{number(low, 3)} to {number(high, 3)}×" if high > low * 1.005 else f"{number(middle, 3)}×"
    end = f"; no number passes {number(fit.ceiling, 3)}×" if fit.ceiling else ""
    return f"Beyond: {ranks} ranks would reach {band} by the law of {NAMES[fit.law]}{end}."


NAMES = {"amdahl": "Amdahl", "gustafson": "Gustafson", "universal": "universal scalability"}
