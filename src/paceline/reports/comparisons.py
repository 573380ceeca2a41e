"""Compare models by how they scale, and set-ups by what they take and cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.io.format import duration, number, percent, size
from paceline.io.table import UNKNOWN, Table
from paceline.measurement.rows import find_reference
from paceline.measurement.tables import format_speedup, format_usd
from paceline.measurement.verdict import RankChoice, decide_ranks
from paceline.reports.run_view import RunView
from paceline.reports.series import Series, TimesLine
from paceline.runlog.summary import find_score


@dataclass(frozen=True)
class CostLine:
    label: str
    devices: int
    hours: float
    usd_per_hour: float  # of all its devices
    epoch_s: float | None = None
    utilisation: str = ""
    memory: str = ""

    @property
    def usd(self) -> float:
        return self.hours * self.usd_per_hour


def list_table_costs(name: str, timed: Sequence[TimesLine]) -> list[CostLine]:
    """Return the cost of each line of a table of times that has a price."""
    several = len({line.devices for line in timed}) > 1
    return [
        CostLine(
            f"{name}, {line.devices} device{'s' * (line.devices > 1)}" if several else name,
            line.devices,
            line.seconds / 3600,
            line.price,
            line.seconds / line.epochs if line.epochs else None,
            line.utilisation,
            line.memory,
        )
        for line in timed
        if line.price is not None
    ]


def list_series_costs(s: Series) -> list[CostLine]:
    """Return the cost of each row of a measurement, or of runs, that has a price; none if they are not possible."""
    found: list[CostLine] = []
    decision = decide_ranks(s.rows)
    if decision is not None and decision.choice is RankChoice.IMPOSSIBLE:
        return found
    for row in s.measured:
        if row.cost.hours and row.cost.cost_usd is not None:
            share, peaks = row.resources.usage.get("device_share"), row.loads.peak_bytes_per_rank
            found.append(
                CostLine(
                    f"{s.name}, {row.label}",
                    row.ranks,
                    row.cost.hours,
                    row.cost.cost_usd / row.cost.hours,
                    s.epoch_s.get(row.label),
                    percent(share) if share is not None else "",
                    size(max(peaks)) if peaks else "",
                )
            )
    return found


def build_costs_table(costs: Sequence[CostLine]) -> Table:
    first, cheapest = costs[0], find_cheapest(costs)
    table = Table(
        *("", "devices", "per epoch", "total time", "utilisation", "memory", "USD/h", "total USD", "relative"),
        name="costs",
        title="What each set-up costs",
        note=f"USD/h is the price of all devices of a row; relative is the total cost against {first.label}.",
        mark=True,
    )
    for line in costs:
        table.add_row(
            line.label,
            number(line.devices),
            duration(line.epoch_s) if line.epoch_s else UNKNOWN,
            duration(3600 * line.hours),
            line.utilisation or UNKNOWN,
            line.memory or UNKNOWN,
            format_usd(line.usd_per_hour),
            format_usd(line.usd),
            "–" if line is first else f"{100 * (line.usd / first.usd - 1):+.0f} %",
            chosen=line is cheapest,
        )
    return table


def find_cheapest(costs: Sequence[CostLine]) -> CostLine:
    """Return the set-up with the lowest total cost, of equal ones the fastest."""
    return min(costs, key=lambda line: (float(f"{line.usd:.3g}"), line.hours))


def describe_costs(costs: Sequence[CostLine]) -> str:
    """Return which set-up is the cheapest and which the fastest, in one sentence."""
    cheapest, fastest = find_cheapest(costs), min(costs, key=lambda line: (round(line.hours, 4), line.usd))
    head = f"Cheapest: {cheapest.label}, {format_usd(cheapest.usd)} USD in {duration(3600 * cheapest.hours)}"
    if fastest is cheapest:
        return f"{head}; none is faster."
    more = f"{100 * (fastest.usd / cheapest.usd - 1):+.0f} %"
    return (
        f"{head}; fastest: {fastest.label}, {format_usd(fastest.usd)} USD ({more}) in {duration(3600 * fastest.hours)}."
    )


def build_models_table(series: Sequence[Series], runs: Sequence[RunView]) -> Table:
    """Build a line for each model and number of ranks: time, speed-up, efficiency, R and the score."""
    scores = {run.name: score for run in runs if (score := find_score(run.summary)) is not None}
    names = {score.name for score in scores.values()}
    metric = names.pop() if len(names) == 1 else ""
    timed = "per epoch" if all(row.label in s.epoch_s for s in series for row in s.measured) else "step"
    table = Table(
        *("", "ranks", f"one rank, {timed}", timed, "speed-up", "efficiency", "R", *([metric] if metric else [])),
        name="models",
        title="How each model scales",
        note="R is compute over communication in flight; below 1 a rank sends for longer than it computes.",
    )
    for s in series:
        base = find_reference(s.measured)
        for row in s.measured:
            if base is None or row is base:
                continue
            times = (s.epoch_s.get(each.label, each.step_s) for each in (base, row))
            ratio, score = row.compute_over_comm, scores.get(row.label)
            table.add_row(
                s.name,
                number(row.ranks),
                *map(duration, times),
                format_speedup(row.speedup),
                percent(row.efficiency),
                number(ratio, 3) if ratio is not None else UNKNOWN,
                *([number(score.value) if score else UNKNOWN] if metric else []),
            )
    return table


def describe_models(series: Sequence[Series], runs: Sequence[RunView]) -> str:
    """Return which model has the best score on any number of ranks, and which comes next; "" if it is not known."""
    scores = {run.name: score for run in runs if (score := find_score(run.summary)) is not None}
    best = {
        s.name: max(known, key=lambda score: score.goodness)
        for s in series
        if (known := [scores[row.label] for row in s.measured if row.label in scores])
    }
    if len(best) < 2 or len({score.name for score in best.values()}) > 1:
        return ""
    (name, score), (second, behind), *_ = sorted(best.items(), key=lambda pair: -pair[1].goodness)
    if score.value == behind.value:
        return f"{name} and {second} have the same {score.name}, {number(score.value)}."
    extreme = "lowest" if score.less_is_better else "highest"
    return f"{name} has the {extreme} {score.name}, {number(score.value)}; next is {second}, {number(behind.value)}."
