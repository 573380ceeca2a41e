"""A sweep as a page: which values did best, as a picture and as a table. One file, without scripts."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from typing import Any

from paceline.record.browser import policy, template
from paceline.record.files import write_atomic
from paceline.record.units import duration, number
from paceline.reporting.page import asset
from paceline.reporting.style import COLOURS, FAINT, drawing, literal
from paceline.signs import visible
from paceline.sweeping.result import Sweep, TrialRow, shown_values

PAGE, PICTURE = "sweep.html", "sweep.png"
PANELS = 6
MOST_LETTERS, FEWEST_LETTERS = 36, 6
"""Below a panel, and of one word there, however many there are."""
FAR = 30
"""Times the least value, from which on an axis is logarithmic."""
APART = 0.2
"""Of such an axis, between two values that are written beside it."""
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{{ style }}</style></head>
<body><main><h1>{{ title }}</h1>
<p>{{ verdict }}</p>
{% if picture %}<figure><img alt="{{ metric }} by value"
src="data:image/png;base64,{{ picture }}"></figure>
{% endif %}<div class="scroll"><table>
<thead><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></main></body></html>
"""


def write_page(sweep: Sweep) -> None:
    from markupsafe import Markup

    drawn = picture(sweep) if sweep.best is not None else b""
    if drawn:
        write_atomic(sweep.folder / PICTURE, drawn)
    text = template(TEMPLATE).render(
        title=sweep.folder.resolve().name,
        policy=policy(),
        style=Markup(style()),
        verdict=verdict(sweep),
        picture=base64.b64encode(drawn).decode(),
        metric=sweep.metric,
        head=head(sweep),
        rows=[cells(sweep, row) for row in sweep.rows],
    )
    write_atomic(sweep.folder / PAGE, text)


def style() -> str:
    """That of a report, whose script would choose the dark colours: here the browser does. The picture is on white."""
    report = asset("page.css")
    dark = re.search(r':root\[data-theme="dark"\] (\{.*?\})', report, re.DOTALL)
    assert dark is not None
    chosen = f"@media screen and (prefers-color-scheme: dark) {{ html {{ color-scheme: dark; }} :root {dark[1]} }}"
    return f"{report}{chosen}\nfigure {{ margin: 1rem 0; }}\nimg {{ max-width: 100%; border-radius: .5rem; }}\n"


def verdict(sweep: Sweep) -> str:
    best = sweep.best
    done = sum(row.score is not None for row in sweep.trials)
    if best is None:
        return f"None of {len(sweep.trials)} trials has a score yet."
    by = "lowest" if sweep.score.startswith("-") else "highest"
    whole = sum(row.length == best.length for row in sweep.trials) if _lengths(sweep) else done
    trials = f"{whole} trial{'s' * (whole > 1)}" + (f" of {done} that went on" if whole < done else "")
    what = f"{by} {sweep.metric} of {trials}: {number(best.score, 5)}"
    return f"{what} with {shown_values(best, sweep.keys)} (trial {best.number})"


def head(sweep: Sweep) -> list[str]:
    return ["trial", *sweep.keys, sweep.metric, "time", *(["length"] if _lengths(sweep) else []), "status"]


def cells(sweep: Sweep, row: TrialRow) -> list[str]:
    values = [_cell(row.values.get(key)) for key in sweep.keys]
    score = number(row.score, 5) if row.score is not None else ""
    time = duration(row.seconds) if row.seconds else ""
    length = [str(row.length or "")] if _lengths(sweep) else []
    status = f"failed: {row.why.splitlines()[0]}" if row.status == "failed" and row.why else row.status
    return [str(row.number), *values, score, time, *length, status]


def _lengths(sweep: Sweep) -> bool:
    """Whether trials are of different length."""
    return any(len(row.history) > 1 or row.status == "dropped" for row in sweep.trials)


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def picture(sweep: Sweep) -> bytes:
    """A panel for each key, and with halving one of the scores on the way."""
    rows = [row for row in sweep.rows if row.score is not None]
    keys, way = sweep.keys[:PANELS], _lengths(sweep)
    with drawing():
        from matplotlib.figure import Figure

        count = len(keys) + way
        figure = Figure(figsize=(min(3.2 * count + 0.6, 16), 3.0), layout="constrained")
        panels = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
        panels[0].set_ylabel(literal(sweep.metric.replace("_", " ")))
        if way:
            _draw_way(panels.pop(), sweep)
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
            shown = _apart(values)
            axes.set_xticks(shown, [number(value, 2) for value in shown])
            axes.minorticks_off()
        elif all(isinstance(value, int) for value in values):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        words = sorted({_cell(value) for value in values})
        places = [words.index(_cell(value)) for value in values]
        axes.set_xticks(range(len(words)), literal([_end_of(word, MOST_LETTERS // len(words)) for word in words]))
    scores = [row.score for row in rows]
    axes.scatter(places, scores, s=22, color=COLOURS[0], alpha=0.75, linewidths=0)
    axes.scatter(places[:1], scores[:1], s=60, facecolors="none", edgecolors=COLOURS[1], linewidths=2)
    axes.set_xlabel(literal(_end_of(key, MOST_LETTERS)))


def _end_of(text: str, most: int) -> str:
    """Of a long text what tells it from others: the name of a file, rather than that of a folder."""
    text, most = visible(text), max(most, FEWEST_LETTERS)
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _apart(values: Sequence[float]) -> list[float]:
    """Those that there is room to write beside a logarithmic axis."""
    least, found = APART * math.log(max(values) / min(values)), [min(values)]
    for value in sorted(values):
        if value > found[-1] and math.log(value / found[-1]) >= least:
            found.append(value)
    return found


def _draw_way(axes: Any, sweep: Sweep) -> None:
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
