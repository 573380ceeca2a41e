"""A sweep as a page: which values did best, as a picture and as a table. One file, without scripts."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from paceline.config import SpecSource
from paceline.io.escape import escape_hidden
from paceline.io.files import write_atomic
from paceline.io.format import duration, number
from paceline.io.html_page import build_content_policy, compile_template
from paceline.io.table import Column, Table
from paceline.reports.page import read_asset
from paceline.reports.plot_style import COLOURS, FAINT, escape_mathtext, use_plot_style
from paceline.trials.sweep import Sweep, SweepOptions, TrialRow, build_sweep_plan, format_values, run_sweep_trials
from paceline.workload import LogFn

PAGE, PICTURE = "sweep.html", "sweep.png"
PANELS = 6
MOST_LETTERS, FEWEST_LETTERS = 36, 6
FAR = 30
"""Times the least value, from which on an axis is logarithmic."""
APART = 0.2
"""Of such an axis, between two values that are written beside it."""


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
    from markupsafe import Markup

    drawn = draw_sweep(sweep) if sweep.best is not None else b""
    if drawn:
        write_atomic(sweep.folder / PICTURE, drawn)
    text = compile_template(read_asset("sweep.html.j2")).render(
        title=sweep.folder.resolve().name,
        policy=build_content_policy(),
        style=Markup(build_sweep_style()),
        verdict=describe_sweep(sweep),
        picture=base64.b64encode(drawn).decode(),
        metric=sweep.metric,
        table=build_sweep_table(sweep),
    )
    write_atomic(sweep.folder / PAGE, text)


def build_sweep_style() -> str:
    """Return the style of a report, with the colour scheme that the browser prefers."""
    report = read_asset("page.css")
    dark = re.search(r':root\[data-theme="dark"\] (\{.*?\})', report, re.DOTALL)
    assert dark is not None
    chosen = f"@media screen and (prefers-color-scheme: dark) {{ html {{ color-scheme: dark; }} :root {dark[1]} }}"
    return f"{report}{chosen}\nfigure {{ margin: 1rem 0; }}\nimg {{ max-width: 100%; border-radius: .5rem; }}\n"


def describe_sweep(sweep: Sweep) -> str:
    best = sweep.best
    done = sum(row.score is not None for row in sweep.trials)
    if best is None:
        return f"None of {len(sweep.trials)} trials has a score yet."
    by = "lowest" if sweep.score.startswith("-") else "highest"
    whole = sum(row.length == best.length for row in sweep.trials) if _has_lengths(sweep) else done
    trials = f"{whole} trial{'s' * (whole > 1)}" + (f" of {done} that continued" if whole < done else "")
    what = f"{by} {sweep.metric} of {trials}: {number(best.score, 5)}"
    return f"{what} with {format_values(best, sweep.keys)} (trial {best.number})"


def build_sweep_table(sweep: Sweep, most: int | None = None) -> Table:
    lengths = ["length"] if _has_lengths(sweep) else []
    table = Table("trial", *sweep.keys, sweep.metric, "time", *lengths, Column("status", "left"), left=0)
    for row in sweep.rows[:most]:
        table.add_row(
            str(row.number),
            *(_format_value(row.values.get(key)) for key in sweep.keys),
            number(row.score, 5) if row.score is not None else "",
            duration(row.seconds) if row.seconds else "",
            *[str(row.length or "")] * len(lengths),
            f"failed: {row.why.splitlines()[0]}" if row.status == "failed" and row.why else row.status,
        )
    return table


def _has_lengths(sweep: Sweep) -> bool:
    return any(len(row.history) > 1 or row.status == "dropped" for row in sweep.trials)


def _format_value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def draw_sweep(sweep: Sweep) -> bytes:
    rows = [row for row in sweep.rows if row.score is not None]
    keys, way = sweep.keys[:PANELS], _has_lengths(sweep)
    with use_plot_style():
        from matplotlib.figure import Figure

        count = len(keys) + way
        figure = Figure(figsize=(min(3.2 * count + 0.6, 16), 3.0), layout="constrained")
        panels = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
        panels[0].set_ylabel(escape_mathtext(sweep.metric.replace("_", " ")))
        if way:
            _draw_history(panels.pop(), sweep)
        for axes, key in zip(panels, keys, strict=True):
            _draw_key(axes, key, rows, str(sweep.asked.get("keys", {}).get(key, "")).endswith(":log"))
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=130)
    return content.getvalue()


def _draw_key(axes: Any, key: str, rows: Sequence[TrialRow], log: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    values = [row.values[key] for row in rows]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numbers:
        places = values
        if min(values) > 0 and (log or max(values) >= FAR * min(values)):
            axes.set_xscale("log")
            shown = _space_out(values)
            axes.set_xticks(shown, [number(value, 2) for value in shown])
            axes.minorticks_off()
        elif all(isinstance(value, int) for value in values):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        words = sorted({_format_value(value) for value in values})
        places = [words.index(_format_value(value)) for value in values]
        axes.set_xticks(
            range(len(words)), escape_mathtext([_cut_start(word, MOST_LETTERS // len(words)) for word in words])
        )
    scores = [row.score for row in rows]
    axes.scatter(places, scores, s=22, color=COLOURS[0], alpha=0.75, linewidths=0)
    axes.scatter(places[:1], scores[:1], s=60, facecolors="none", edgecolors=COLOURS[1], linewidths=2)
    axes.set_xlabel(escape_mathtext(_cut_start(key, MOST_LETTERS)))


def _cut_start(text: str, most: int) -> str:
    """Shorten a text to its end, which tells paths apart."""
    text, most = escape_hidden(text), max(most, FEWEST_LETTERS)
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _space_out(values: Sequence[float]) -> list[float]:
    """Select the values that there is room for beside a logarithmic axis."""
    least, found = APART * math.log(max(values) / min(values)), [min(values)]
    for value in sorted(values):
        if value > found[-1] and math.log(value / found[-1]) >= least:
            found.append(value)
    return found


def _draw_history(axes: Any, sweep: Sweep) -> None:
    best = sweep.best
    for row in sweep.trials:
        if row.history:
            ours = best is not None and row.number == best.number
            colour, width = (COLOURS[1], 2.0) if ours else (FAINT, 0.9)
            axes.plot(*zip(*row.history, strict=True), color=colour, linewidth=width, marker="o", markersize=3)
    lengths = sorted({length for row in sweep.trials for length, _ in row.history})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the training")
