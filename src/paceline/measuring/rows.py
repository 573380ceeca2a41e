"""The rows of a measurement: each layout with its medians over repeats, its speed-up, and what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from paceline.measuring.reading import TERMS, RunTimes

WORTH = 0.5
"""Efficiency below which more ranks are not recommended: half of what is paid for would be lost."""


@dataclass(frozen=True)
class Row:
    """One layout. Times are seconds per step; None where the row failed or nothing is known."""

    label: str
    ranks: int
    failed: str = ""
    """Why there are no numbers, in a few words."""
    why: str = ""
    """The same in full."""
    layout: str = ""
    global_batch: int | None = None
    passes: int = 1
    fits: bool = False
    """A topic model: a step is a pass over all documents, and there are no gradients."""
    threads: int | None = None
    device: str | None = None
    """As its driver calls it; None on CPU cores."""
    repeats: int = 0
    runs: tuple[str, ...] = ()
    """Folders of the repeats, below that of the measurement."""
    step_s: float | None = None
    step_s_low: float | None = None
    step_s_high: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    exposed_s: float | None = None
    waiting_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes_per_rank: tuple[int, ...] = ()
    busy_s_by_rank: tuple[float, ...] = ()
    parameters: int | None = None
    mfu: float | None = None
    """Share of the peak of the devices that the arithmetic of the model reaches."""
    usage: dict[str, float] = field(default_factory=dict)
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    speedups: tuple[float, ...] = ()
    """Of each repeat, over the one-rank run beside it in time."""
    hours: float | None = None
    device_hours: float | None = None
    cost_usd: float | None = None
    usd_per_million_samples: float | None = None
    recommended: bool = False

    @property
    def efficiency(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.ranks

    @property
    def compute_over_comm(self) -> float | None:
        """R: time of the arithmetic over time that collectives are in flight."""
        return self.compute_s / self.comm_s if self.compute_s is not None and self.comm_s else None

    @property
    def slowest_rank(self) -> tuple[int, float] | None:
        """(rank, its work over the mean of the others); None on one rank."""
        busy = self.busy_s_by_rank
        if len(busy) < 2:
            return None
        worst = max(range(len(busy)), key=lambda rank: busy[rank])
        others = statistics.fmean(b for rank, b in enumerate(busy) if rank != worst)
        return worst, busy[worst] / others if others else 1.0

    @property
    def other_s(self) -> float:
        """What the medians of the parts leave of the median step."""
        if self.step_s is None:
            return 0.0
        return max(0.0, self.step_s - (self.compute_s or 0.0) - (self.data_s or 0.0) - (self.exposed_s or 0.0))

    def as_json(self) -> dict[str, Any]:
        slow = self.slowest_rank
        derived = {
            "efficiency": self.efficiency,
            "compute_over_comm": self.compute_over_comm,
            "slowest_rank": slow and slow[0],
            "slowest_over_others": slow and slow[1],
        }
        return {**asdict(self), **derived}


def row_from_json(values: Mapping[str, Any]) -> Row:
    known: dict[str, Any] = {f.name: values[f.name] for f in fields(Row) if f.name in values}
    return Row(**as_tuples(known))


def as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has as lists, as the tuples they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def combined(row: Row, times: Sequence[RunTimes]) -> Row:
    """A row with the numbers of its middle repeat: they belong together, as medians of each by itself would not."""
    if not times:
        return row
    steps = [t.step_s for t in times]
    middle = times[_middle(steps)]
    if middle.documents:
        each = -(-middle.documents // row.ranks)
        told = f"{middle.documents:,} documents = {each:,} per rank × {row.ranks} rank{'s' * (row.ranks > 1)}"
        row = replace(row, fits=True, layout=told, global_batch=middle.documents, passes=1)
    values: dict[str, Any] = {name: getattr(middle, name) for name in TERMS}
    return replace(
        row,
        **values,
        repeats=len(times),
        step_s_low=min(steps),
        step_s_high=max(steps),
        samples_per_s=middle.samples_per_s,
        tokens_per_s=middle.tokens_per_s,
        busy_s_by_rank=middle.busy_s_by_rank,
        peak_bytes_per_rank=max((t.peak_bytes_per_rank for t in times), key=lambda peaks: max(peaks, default=0)),
        parameters=middle.parameters,
        threads=middle.threads,
        device=middle.device,
    )


def _middle(steps: Sequence[float]) -> int:
    """The place of the median; of an even number, of the faster one in the middle."""
    return sorted(range(len(steps)), key=lambda i: steps[i])[(len(steps) - 1) // 2]


def with_speedups(rows: Sequence[Row], rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Speed-ups against the one-rank row, or against the fewest ranks that worked.

    `rates` are samples per second of each repeat, by label. The spread is that of pairs of neighbours in time.
    """
    base = reference(rows)
    if base is None or not base.samples_per_s:
        return list(rows)
    alone = rates[base.label]
    found = []
    for row in rows:
        own = rates.get(row.label, ())
        if row.failed or not own or not row.samples_per_s:
            found.append(row)
            continue
        pairs = [r / alone[min(i, len(alone) - 1)] * base.ranks for i, r in enumerate(own)]
        speedup = row.samples_per_s / base.samples_per_s * base.ranks
        low, high = min(speedup, *pairs), max(speedup, *pairs)
        found.append(replace(row, speedups=tuple(pairs), speedup=speedup, speedup_low=low, speedup_high=high))
    return found


def reference(rows: Sequence[Row]) -> Row | None:
    """The row that speed-ups are counted from: one rank, or the fewest that worked."""
    done = [row for row in rows if row.samples_per_s]
    return min(done, key=lambda row: row.ranks, default=None)


def priced(rows: Sequence[Row], total_samples: int | None, usd_per_device_hour: float | None) -> list[Row]:
    """Time, device-hours and cost of the whole run on each row, and the row to take."""
    best = recommended(rows)
    found = []
    for row in rows:
        if not row.samples_per_s:
            found.append(row)
            continue
        hours = total_samples / row.samples_per_s / 3600 if total_samples else None
        device_hours = hours * row.ranks if hours is not None else None
        price = usd_per_device_hour
        per_million = 1e6 / row.samples_per_s / 3600 * row.ranks * price if price is not None else None
        found.append(
            replace(
                row,
                hours=hours,
                device_hours=device_hours,
                cost_usd=device_hours * price if device_hours is not None and price is not None else None,
                usd_per_million_samples=per_million,
                recommended=best is not None and row.label == best.label,
            )
        )
    return found


def recommended(rows: Sequence[Row]) -> Row | None:
    """The fastest at an efficiency of a half or more; where speed is the same within its spread, the fewer ranks."""
    done = [row for row in rows if row.speedup is not None and row.efficiency is not None]
    fine = [row for row in done if (row.efficiency or 0) >= WORTH] or done
    if not fine:
        return None
    best = max(fine, key=lambda row: row.speedup or 0)
    as_fast = [row for row in fine if (row.speedup_high or 0) >= (best.speedup or 0) and row.ranks < best.ranks]
    return min(as_fast, key=lambda row: row.ranks, default=best)
