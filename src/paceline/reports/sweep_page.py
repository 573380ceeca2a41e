"""A sweep as a page: which values did best, as charts and as a table."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from paceline.config import SpecSource
from paceline.io.files import write_atomic
from paceline.io.format import duration, number, plural
from paceline.io.table import Column, Table
from paceline.reports.charts import Chart, draw_lines
from paceline.reports.page import PageHead, render_page
from paceline.trials.sweep import Sweep, SweepOptions, TrialRow, build_sweep_plan, format_values, run_sweep_trials
from paceline.workload import LogFn

PAGE = "sweep.html"
PANELS = 6
FAR = 30
"""Times the least value, from which on an axis is logarithmic."""


def sweep(
    spec: SpecSource,
    values: Sequence[str] | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    log: LogFn = lambda text: None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Train a run with several values of its keys, `{"train.lr": [0.05, 0.1], "model.depth": "2..8"}`, and rank them.

    The folder `out` (runs/NAME-sweep) holds the runs, sweep.json, sweep.csv and a page. A stopped sweep is resumed.
    """
    return run_sweep_trials(build_sweep_plan(spec, values, out, options), options, log, write_sweep_page)


def write_sweep_page(sweep: Sweep) -> None:
    charts, table, verdict = build_sweep_charts(sweep), build_sweep_table(sweep), describe_sweep(sweep)
    command = ""
    if sweep.best:
        command = f"paceline train {shlex.quote(str(sweep.folder / sweep.best.run / 'spec.yaml'))}"
    head = PageHead(sweep.folder.resolve().name, (f"{verdict[0].upper()}{verdict[1:]}",), command=command)
    text = render_page(head, charts, [table], parts={"": [*(chart.name for chart in charts), table.name]})
    write_atomic(sweep.folder / PAGE, text)


def describe_sweep(sweep: Sweep) -> str:
    best = sweep.best
    done = sum(row.score is not None for row in sweep.trials)
    if best is None:
        return f"None of {len(sweep.trials)} trials has a score yet."
    by = "lowest" if sweep.score.startswith("-") else "highest"
    whole = sum(row.length == best.length for row in sweep.trials) if _has_lengths(sweep) else done
    trials = plural(whole, "trial") + (f" of {done} that continued" if whole < done else "")
    what = f"{by} {sweep.metric} of {trials}: {number(best.score, 5)}"
    return f"{what} with {format_values(best, sweep.keys)} (trial {best.number})"


def build_sweep_table(sweep: Sweep, most: int | None = None) -> Table:
    lengths = ["length"] if _has_lengths(sweep) else []
    columns: tuple[str | Column, ...] = ("trial", sweep.metric, *sweep.keys, "time", *lengths, Column("status", "left"))
    table = Table(*columns, left=0, name="trials", title="Trials")
    for place, row in enumerate(sweep.rows[:most]):
        table.add_row(
            str(row.number),
            number(row.score, 5) if row.score is not None else "",
            *(_format_value(row.values.get(key)) for key in sweep.keys),
            duration(row.seconds) if row.seconds else "",
            *[str(row.length or "")] * len(lengths),
            f"failed: {row.why.splitlines()[0]}" if row.status == "failed" and row.why else row.status,
            chosen=place == 0 and row.score is not None,
        )
    return table


def _has_lengths(sweep: Sweep) -> bool:
    return any(len(row.history) > 1 or row.status == "dropped" for row in sweep.trials)


def _format_value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def build_sweep_charts(sweep: Sweep) -> list[Chart]:
    """Build a chart of the score by each key, the best trial first, and one by length if trials were halved."""
    rows = [row for row in sweep.rows if row.score is not None and math.isfinite(row.score)]
    if not rows:
        return []
    charts = [_chart_key(sweep, rows, place) for place in range(len(sweep.keys[:PANELS]))]
    if _has_lengths(sweep):
        lines = [{"name": f"trial {row.number}", "points": row.history} for row in rows if row.history]
        data = draw_lines(lines, sweep.metric, unit="length of the training", marked=True)
        charts.append(Chart("halving", "Over the length of the training", "The best third continues.", data))
    return charts


def _chart_key(sweep: Sweep, rows: Sequence[TrialRow], place: int) -> Chart:
    key = sweep.keys[place]
    values = [row.values.get(key) for row in rows]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    words = [] if len(numbers) == len(values) else sorted({_format_value(value) for value in values})
    wide = bool(numbers) and 0 < FAR * min(numbers) <= max(numbers)
    log = not words and min(numbers) > 0 and (wide or str(sweep.asked.get("keys", {}).get(key, "")).endswith(":log"))
    places = [words.index(_format_value(value)) for value in values] if words else numbers
    points = [[x, row.score, row.number] for x, row in zip(places, rows, strict=True)]
    data = {"kind": "scatter", "points": points, "words": words, "log": log, "unit": key, "label": sweep.metric}
    return Chart(f"key{place}", f"{sweep.metric} by {key}", "A point for each trial; the ring is the best.", data)
