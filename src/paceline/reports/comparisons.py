"""Compare models by how they scale, and set-ups by what they take and cost."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.io.format import duration, number, percent, plural, size
from paceline.io.table import UNKNOWN, Table
from paceline.measurement.rows import find_reference
from paceline.measurement.tables import format_known, format_speedup, format_usd
from paceline.measurement.verdict import RankChoice, decide_ranks
from paceline.reports.run_view import RunView, describe_best
from paceline.reports.series import Series, TimedSetup
from paceline.runlog.summary import Score, find_score


def list_table_costs(name: str, timed: Sequence[TimedSetup]) -> list[TimedSetup]:
    """Return the lines of a table of times that have a price, with a label."""
    several = len({line.devices for line in timed}) > 1
    priced = [line for line in timed if line.price is not None]
    return [replace(line, label=f"{name}, {plural(line.devices, 'device')}" if several else name) for line in priced]


def list_series_costs(s: Series) -> list[TimedSetup]:
    """Return the rows of a measurement, or of runs, that have a price; none if they are not possible."""
    decision = decide_ranks(s.rows)
    if decision is not None and decision.choice is RankChoice.IMPOSSIBLE:
        return []
    return [
        TimedSetup(
            label=f"{s.name}, {row.label}",
            devices=row.ranks,
            seconds=3600 * row.cost.hours,
            price=row.cost.cost_usd / row.cost.hours,
            epoch_s=s.epoch_s.get(row.label),
            utilisation=format_known(percent, row.resources.usage.get("device_share")),
            memory=format_known(size, row.loads.peak_bytes),
        )
        for row in s.measured
        if row.cost.hours and row.cost.cost_usd is not None
    ]


def build_costs_table(costs: Sequence[TimedSetup]) -> Table:
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
            format_known(duration, line.epoch_s),
            duration(line.seconds),
            line.utilisation or UNKNOWN,
            line.memory or UNKNOWN,
            format_known(format_usd, line.price),
            format_usd(line.usd),
            UNKNOWN if line is first else _format_change(line, first),
            chosen=line is cheapest,
        )
    return table


def _format_change(line: TimedSetup, other: TimedSetup) -> str:
    return f"{100 * (line.usd / other.usd - 1):+.0f} %"


def find_cheapest(costs: Sequence[TimedSetup]) -> TimedSetup:
    """Return the set-up with the lowest total cost, of equal ones the fastest."""
    return min(costs, key=lambda line: (float(f"{line.usd:.3g}"), line.seconds))


def describe_costs(costs: Sequence[TimedSetup]) -> str:
    """Return which set-up is the cheapest and which the fastest, in one sentence."""
    cheapest, fastest = find_cheapest(costs), min(costs, key=lambda line: (round(line.seconds), line.usd))
    head = f"Cheapest: {cheapest.label}, {format_usd(cheapest.usd)} USD in {duration(cheapest.seconds)}"
    if fastest is cheapest:
        return f"{head}; none is faster."
    usd = f"{format_usd(fastest.usd)} USD ({_format_change(fastest, cheapest)})"
    return f"{head}; fastest: {fastest.label}, {usd} in {duration(fastest.seconds)}."


def find_scores(runs: Sequence[RunView]) -> dict[str, Score]:
    """Return the scores of the runs that were evaluated, by name."""
    return {run.name: score for run in runs if (score := find_score(run.summary)) is not None}


def build_models_table(series: Sequence[Series], runs: Sequence[RunView]) -> Table:
    """Build a line for each model and number of ranks: time, speed-up, efficiency, R and the score."""
    scores = find_scores(runs)
    names = {score.name for score in scores.values()}
    metric = [*names] if len(names) == 1 else []
    timed = "per epoch" if all(row.label in s.epoch_s for s in series for row in s.measured) else "step"
    table = Table(
        *("", "ranks", f"one rank, {timed}", timed, "speed-up", "efficiency", "R", *metric),
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
            score = scores.get(row.label)
            table.add_row(
                s.name,
                number(row.ranks),
                *map(duration, times),
                format_speedup(row.speedup),
                percent(row.efficiency),
                format_known(number, row.compute_over_comm, 3),
                *[number(score.value) if score else UNKNOWN] * len(metric),
            )
    return table


def describe_models(series: Sequence[Series], runs: Sequence[RunView]) -> str:
    """Return which model has the best score on any number of ranks, and which comes next; "" if it is not known."""
    scores = find_scores(runs)
    best = {
        s.name: max(known, key=lambda score: score.goodness)
        for s in series
        if (known := [scores[row.label] for row in s.measured if row.label in scores])
    }
    if len(best) < 2 or len({score.name for score in best.values()}) > 1:
        return ""
    return describe_best(sorted(best.items(), key=lambda pair: -pair[1].goodness))
