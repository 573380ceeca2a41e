"""Rows of a measurement: a layout with its medians over repeats, its speed-up and its cost."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from paceline.io.files import from_flat, to_flat
from paceline.io.format import plural
from paceline.measurement.run_times import ObservedScript, RunTimes, StepParts

LEAST_EFFICIENCY = 0.5  # else not recommended
LEAST_GAIN = 1.1  # over fewer ranks, else not recommended
LEAST_NOISE, NOISY = 0.05, 0.25  # of the middle repeat: expected in any case; too much to tell a cause
FEW_RETURNS = 0.7  # of a device, for each that is added
GRADIENT_BYTES = 4.0


@dataclass(frozen=True)
class BatchLayout:
    layout: str = ""
    global_batch: int | None = None
    passes: int = 1
    only_gradients: bool = field(default=True, compare=False)  # nothing else is sent


@dataclass(frozen=True, kw_only=True)
class FailedRow:
    label: str
    ranks: int
    failed: str  # in a few words
    why: str = ""  # in full
    batch: BatchLayout = BatchLayout()


@dataclass(frozen=True)
class Speedup:
    """Speed relative to the reference, times the ranks of the reference."""

    speedup: float = 1.0
    speedup_low: float = 1.0
    speedup_high: float = 1.0
    speedups: tuple[float, ...] = ()  # against the adjacent run of the reference


@dataclass(frozen=True)
class Cost:
    hours: float | None = None
    device_hours: float | None = None
    cost_usd: float | None = None
    usd_per_million_samples: float | None = None


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    label: str
    ranks: int
    repeats: int = 1
    step_s: float
    step_s_low: float
    step_s_high: float
    samples_per_s: float
    scaling: Speedup = Speedup()
    cost: Cost = Cost()
    rates: tuple[float, ...] = field(default=(), compare=False)  # samples per second of each repeat
    recommended: bool = False

    @property
    def speedup(self) -> float:
        return self.scaling.speedup

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    @property
    def noise(self) -> float:
        """Return how far its repeats lie from their middle, relative to a step; 0 if it ran once."""
        return (self.step_s_high - self.step_s_low) / 2 / self.step_s


class SlowestRank(NamedTuple):
    rank: int
    over_others: float  # its work / mean of the others


@dataclass(frozen=True)
class RankLoads:
    peak_bytes_per_rank: tuple[int, ...] = ()
    busy_s_by_rank: tuple[float, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        return max(self.peak_bytes_per_rank, default=None)

    @property
    def slowest(self) -> SlowestRank | None:
        busy = self.busy_s_by_rank
        if len(busy) < 2:
            return None
        worst = busy.index(max(busy))
        others = statistics.fmean(busy[:worst] + busy[worst + 1 :])
        return SlowestRank(worst, busy[worst] / others if others else 1.0)


@dataclass(frozen=True)
class Resources:
    threads: int | None = None
    device: str | None = None
    mfu: float | None = None  # share of the peak of the devices
    usage: dict[str, float] = field(default_factory=dict)
    workers: int | None = None
    load_s: float | None = None
    device_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(TimedRow):
    batch: BatchLayout = BatchLayout()
    runs: tuple[str, ...] = ()
    parts: StepParts
    tokens_per_s: float | None = None
    loads: RankLoads = RankLoads()
    compiled_steps: int = 0
    compiled_s: float = 0.0
    parameters: int | None = None
    resources: Resources = field(default_factory=Resources)
    fits: bool = False  # steps are passes over all samples
    outside: bool = False  # a command was measured
    ddp: bool = False  # … that sums gradients by DistributedDataParallel

    @property
    def compute_over_comm(self) -> float | None:
        """R: compute time relative to the time that collectives are in flight."""
        return self.parts.compute_s / self.parts.comm_s if self.parts.comm_s else None

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of a step by what the ranks did, without `other_s`."""
        parts = self.parts
        seconds = (parts.compute_s, parts.travelling_s, parts.waiting_s, parts.data_s)
        return dict(zip(("compute", "exposed", "waiting", "input"), seconds, strict=True))

    @property
    def other_s(self) -> float:
        return max(0.0, self.step_s - self.parts.compute_s - self.parts.data_s - self.parts.exposed_s)

    def link_bits_s(self) -> float | None:
        """Return the bits per second through each rank's link, if plain gradients are sent by ring all-reduce."""
        flight = self.parts.comm_s - self.parts.waiting_s
        plain = self.batch.only_gradients and not self.fits and not self.outside
        if not self.parameters or flight <= 0 or self.ranks < 2 or not plain:
            return None
        return 8 * 2 * (self.ranks - 1) / self.ranks * self.parameters * GRADIENT_BYTES / flight


RowT = TypeVar("RowT", bound=TimedRow)


def dump_measured_row(row: MeasuredRow | FailedRow) -> dict[str, Any]:
    """Return the values of a row by their names, with those that follow from others."""
    known = to_flat(row)
    if isinstance(row, MeasuredRow):
        slow = row.loads.slowest
        known |= {
            "efficiency": row.efficiency,
            "compute_over_comm": row.compute_over_comm,
            "slowest_rank": slow and slow.rank,
            "slowest_over_others": slow and slow.over_others,
        }
    return known


def parse_measured_row(values: Mapping[str, Any]) -> MeasuredRow | FailedRow:
    return from_flat(FailedRow, values) if values.get("step_s") is None else from_flat(MeasuredRow, values)


def drop_failed(rows: Iterable[RowT | FailedRow]) -> list[RowT]:
    return [row for row in rows if not isinstance(row, FailedRow)]


def change_rows(rows: Iterable[RowT | FailedRow], change: Callable[[RowT], RowT]) -> list[RowT | FailedRow]:
    """Return the rows with those changed that did not fail."""
    return [row if isinstance(row, FailedRow) else change(row) for row in rows]


def combine_repeats(
    label: str,
    ranks: int,
    times: Sequence[RunTimes],
    batch: BatchLayout,
    runs: Sequence[str] = (),
    usage: Mapping[str, float] | None = None,
) -> MeasuredRow:
    """Build a row with the numbers of its median repeat: they belong together, as single medians would not."""
    middle = sorted(times, key=lambda t: t.step_s)[(len(times) - 1) // 2]  # of an even number, the faster one
    if middle.seen.from_outside:
        batch = _describe_batch(middle.seen)
    if middle.documents:
        each = -(-middle.documents // ranks)
        equation = f"{middle.documents:,} samples = {each:,} per rank × {plural(ranks, 'rank')}"
        batch = BatchLayout(equation, middle.documents)
    values = to_flat(middle) | {
        "label": label,
        "ranks": ranks,
        "repeats": len(times),
        "step_s_low": min(t.step_s for t in times),
        "step_s_high": max(t.step_s for t in times),
        "runs": tuple(runs),
        "rates": tuple(t.samples_per_s for t in times),
        "peak_bytes_per_rank": max((t.peak_bytes_per_rank for t in times), key=lambda peaks: max(peaks, default=0)),
        "fits": bool(middle.documents),
        "outside": middle.seen.from_outside,
        "usage": dict(usage or {}),
    }
    return replace(from_flat(MeasuredRow, values), batch=batch)


def _describe_batch(seen: ObservedScript) -> BatchLayout:
    if not seen.rank_batches:
        return BatchLayout("samples of a step not known")
    first, total = seen.rank_batches[0], sum(seen.rank_batches)
    terms = f"{first:,} per rank × {plural(len(seen.rank_batches), 'rank')}"
    if len(set(seen.rank_batches)) > 1:
        terms = " + ".join(map(str, seen.rank_batches))
    return BatchLayout(f"{total:,} samples = {terms}", total)


def add_speedups(rows: Sequence[RowT | FailedRow]) -> list[RowT | FailedRow]:
    """Add speed-ups relative to the reference; their spread is that of pairs of runs that are adjacent in time."""
    if (base := find_reference(rows)) is None:
        return list(rows)
    alone = base.rates or (base.samples_per_s,)

    def add_speedup(row: RowT) -> RowT:
        rates = row.rates or (row.samples_per_s,)
        pairs = [r / alone[min(i, len(alone) - 1)] * base.ranks for i, r in enumerate(rates)]
        speedup = row.samples_per_s / base.samples_per_s * base.ranks
        return replace(row, scaling=Speedup(speedup, min(speedup, *pairs), max(speedup, *pairs), tuple(pairs)))

    return change_rows(rows, add_speedup)


def find_reference(rows: Iterable[RowT | FailedRow]) -> RowT | None:
    return min(drop_failed(rows), key=lambda row: row.ranks, default=None)


def is_beyond_devices(row: TimedRow, base: TimedRow) -> bool:
    """Return whether a row is faster than its devices can be: more than 100 % efficient, by more than the noise."""
    noise = max(LEAST_NOISE, min(NOISY, max(row.noise, base.noise)))
    return row.ranks > base.ranks and row.speedup > (1 + noise) * max(base.ranks, count_devices(row, base))


def count_devices(row: TimedRow, base: TimedRow) -> int:
    """Return what a row computes on: a device for each rank, or the cores that it shares with the base."""
    threads = [(r.ranks, r.resources.threads or 1) for r in (row, base) if isinstance(r, MeasuredRow)]
    cores = max((ranks * each for ranks, each in threads if each > 1), default=0)
    return min(row.ranks, cores) if cores and share_cores((row, base)) else row.ranks


def compute_marginal_speedup(row: TimedRow, before: Sequence[TimedRow]) -> float | None:
    """Return the speed-up that each further rank adds over the row with the next fewer ranks."""
    fewer = max((other for other in before if other.ranks < row.ranks), key=lambda other: other.ranks, default=None)
    return None if fewer is None else (row.speedup - fewer.speedup) / (row.ranks - fewer.ranks)


def add_costs(
    rows: Sequence[RowT | FailedRow], total_samples: int | None, usd_per_device_hour: float | None
) -> list[RowT | FailedRow]:
    """Add time, device-hours and cost of the whole run; cores or a device that ranks share count once."""
    shared, price = share_cores(rows), usd_per_device_hour

    def add_cost(row: RowT) -> RowT:
        each = row.resources.device_ranks if isinstance(row, MeasuredRow) else 1
        devices = 1 if shared else -(-row.ranks // each)
        hours = total_samples / row.samples_per_s / 3600 if total_samples else None
        device_hours = hours * devices if hours is not None else None
        usd = device_hours * price if device_hours is not None and price is not None else None
        per_million = 1e6 / row.samples_per_s / 3600 * devices * price if price is not None else None
        return replace(row, cost=Cost(hours, device_hours, usd, per_million))

    return change_rows(rows, add_cost)


def share_cores(rows: Iterable[TimedRow | FailedRow]) -> bool:
    """Return whether the ranks of each row divide the same cores, and so cost the same however many there are."""
    on_cores = (row for row in drop_failed(rows) if isinstance(row, MeasuredRow) and row.resources.device is None)
    return len({row.resources.threads for row in on_cores if row.resources.threads}) > 1


def recommend_row(rows: Iterable[RowT | FailedRow]) -> RowT | None:
    """Return the fastest row that is efficient enough, or one of fewer ranks that is nearly as fast.

    Ranks that share cores cost nothing more, so their efficiency does not matter.
    """
    measured = drop_failed(rows)
    shared = share_cores(measured)
    fine = [row for row in measured if shared or row.efficiency >= LEAST_EFFICIENCY]
    if not fine:
        return None
    best = max(fine, key=lambda row: row.speedup)
    near = [row for row in fine if max(row.scaling.speedup_high, LEAST_GAIN * row.speedup) >= best.speedup]
    return min((row for row in near if row.ranks < best.ranks), key=lambda row: row.ranks, default=best)
