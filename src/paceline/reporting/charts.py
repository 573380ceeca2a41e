"""The charts of a report: what each shows, in numbers, and the files and lines they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.measuring.compare import Planned
from paceline.measuring.links import bits_s_by_size
from paceline.measuring.rows import MeasuredRow, done
from paceline.reporting.chart import MOST_PER_RUN, MOST_POINTS, Chart, short
from paceline.reporting.contents import Contents
from paceline.reporting.curves import curves
from paceline.reporting.run_view import RunView, loss_differences, thinned
from paceline.reporting.series import FileLine, Series, link_name

TERMS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "waiting": "waiting for a slower rank",
    "input": "waiting for input",
    "other": "other",
}
"""The parts of a step, in the order in which they are stacked."""
MOST_SOURCES = 12
LEAST_SHARE = 0.003
"""Of the longest step: a part that is never more than this cannot be seen."""


def charts(contents: Contents, folder: Path) -> list[Chart]:
    """The charts that there are numbers for, in the order of the page."""
    measured = [row for s in contents.layouts for row in s.measured]
    makers = (
        (_scaling, bool(contents.series)),
        (_breakdown, bool(measured)),
        (_loss, bool(contents.runs)),
        (_difference, contents.same is not None and not contents.same.differing),
        (_memory, any(row.loads.peak_bytes_per_rank for row in measured)),
        (_links, bool(contents.links)),
    )
    found = [make(contents) for make, known in makers if known]
    return [_linked(chart, folder) for chart in (*found, *curves(contents.runs))]


def _linked(chart: Chart, folder: Path) -> Chart:
    distinct = list(dict.fromkeys(chart.files))
    shown = tuple((str(source), source.address(folder)) for source in distinct[:MOST_SOURCES])
    return replace(chart, sources=shown, more_sources=len(distinct) - len(shown))


def _row_sources(series: Sequence[Series]) -> list[FileLine]:
    return [s.sources[row.label] for s in series for row in done(s.rows)]


def _scaling(contents: Contents) -> Chart:
    several = len(contents.series) > 1
    reach = 2 * max([1, *(row.ranks for s in contents.series for row in done(s.rows))])
    lines = [_scaling_line(s, s.name if several else "measured", reach) for s in contents.series]
    one, unit = ("rank", "ranks") if contents.layouts else ("device", "devices")
    spans = any(row.repeats > 1 for s in contents.series for row in done(s.rows))
    caption = f"Speed-up over one {one}." + " Bars span the repeats." * spans
    if any(line["fit"] for line in lines):
        caption += " The shaded band holds four in five redrawn fits."
    points = [p["high"] for line in lines for p in line["points"]]
    curves = [p[-1] for line in lines for p in (*line["fit"], *line["plan"])]
    highest = max([1.0, *points, *curves])
    top = max(1.1 * highest, min(reach, 1.5 * highest))  # all points are on the chart, those above the ideal too
    top = math.ceil(top) if top > 3 else short(top, 2)
    data = {"lines": lines, "ideal": [[1, 1], [reach, reach]], "reach": reach, "top": top, "unit": unit}
    return Chart("scaling", "How it scales", caption, data, _row_sources(contents.series), tall=True)


def _scaling_line(s: Series, name: str, reach: int) -> dict[str, Any]:
    law = s.laws[-1] if s.laws else None
    ranks = {row.label: row.ranks for row in s.rows}
    return {
        "name": name,
        "points": [
            {
                "x": row.ranks,
                "y": short(row.speedup),
                "low": short(row.scaling.speedup_low),
                "high": short(row.scaling.speedup_high),
                "label": row.label,
                "source": str(s.sources[row.label]),
            }
            for row in done(s.rows)
        ],
        "law": law.name if law else "",
        "fit": [[p.ranks, short(p.speedup), short(p.low), short(p.high)] for p in law.curve if p.ranks <= reach]
        if law
        else [],
        "plan": [[ranks[p.label], short(p.speedup)] for p in s.planned if p.speedup is not None],
    }


def _breakdown(contents: Contents) -> Chart:
    labels, rows, plans = _labelled(contents.layouts)
    parts = [(row.parts, row.other_s) for row in rows]
    seconds = [(p.compute_s, p.travelling_s, p.waiting_s, p.data_s, other_s) for p, other_s in parts]
    terms = {name: [short(s * 1e3) for s in each] for name, each in zip(TERMS, zip(*seconds, strict=True), strict=True)}
    longest = max(map(sum, zip(*terms.values(), strict=True)))
    terms = {name: values for name, values in terms.items() if max(values) > LEAST_SHARE * longest}
    planned = [None if plan is None else short(plan.step_s * 1e3) for plan in plans]
    caption = "Milliseconds of a step, by what the ranks did: medians over the steps of the middle repeat."
    if any(planned):
        caption += " The mark is the step as it was planned."
    data = {"labels": labels, "terms": terms, "names": TERMS, "plan": planned}
    return Chart("breakdown", "Where the time goes", caption, data, _row_sources(contents.layouts))


def _labelled(series: Sequence[Series]) -> tuple[list[str], list[MeasuredRow], list[Planned | None]]:
    """The rows of all series, each with its name on a chart and its plan."""
    rows = [(s, row) for s in series for row in s.measured]
    labels = [f"{s.name}, {row.label}" if len(series) > 1 else row.label for s, row in rows]
    plans = [{plan.label: plan for plan in s.planned}.get(row.label) for s, row in rows]
    return labels, [row for _, row in rows], plans


def _loss(contents: Contents) -> Chart:
    runs = contents.runs
    each = max(60, min(MOST_PER_RUN, MOST_POINTS // len(runs)))
    lines = []
    for run in runs:
        points = [[p.step, short(p.loss, 7), p.line] for p in thinned(run.points, each) if math.isfinite(p.loss)]
        lines.append({"name": run.name, "file": str(run.file), "points": points})
    title, caption = "The same training", "Training loss of every run, drawn over each other."
    if len(runs) == 1:
        title, caption = "Training", "Training loss."
    elif contents.experiments is not None:
        title = "Training"
    return Chart("loss", title, caption, {"lines": lines}, _first_lines(runs), tall=True)


def _first_lines(runs: Sequence[RunView]) -> list[FileLine]:
    return [FileLine(run.file, run.points[0].line) for run in runs]


def _difference(contents: Contents) -> Chart:
    first, *others = contents.runs
    each = max(60, min(MOST_PER_RUN // 2, MOST_POINTS // 2 // len(others)))
    lines = []
    for run in others:
        found = [(step, d) for step, d in loss_differences(first, run) if 0 < d < math.inf]
        width = max(1, math.ceil(len(found) / each))
        points = [max(found[i : i + width], key=lambda p: p[1]) for i in range(0, len(found), width)]
        lines.append({"name": run.name, "points": [[step, float(f"{d:.3g}")] for step, d in points]})
    caption = f"Relative difference of the loss to {first.name}. Rounding alone gives about 1e-7 in fp32."
    files = _first_lines(contents.runs)
    return Chart("difference", "How far the losses are apart", caption, {"lines": lines}, files)


def _memory(contents: Contents) -> Chart:
    labelled = zip(*_labelled(contents.layouts), strict=True)
    known = [(label, row.loads, plan) for label, row, plan in labelled if row.loads.peak_bytes_per_rank]
    planned = [None if plan is None else short(plan.memory_bytes / 1e6) for _, _, plan in known]
    caption = "Most memory that any rank held: of its device, or of its process on CPU cores."
    if any(planned):
        caption += " The mark is what was planned."
    data = {
        "labels": [label for label, _, _ in known],
        "peaks": [short(max(loads.peak_bytes_per_rank) / 1e6) for _, loads, _ in known],
        "plan": planned,
    }
    return Chart("memory", "Memory", caption, data, _row_sources(contents.layouts))


def _links(contents: Contents) -> Chart:
    several = len(contents.links) > 1
    lines = [
        {
            "name": f"{measured.name}, {link_name(link)}" if several else link_name(link),
            "points": [[sent, short(bits_s / 1e9)] for sent, bits_s in bits_s_by_size(link)],
            "source": str(source),
        }
        for measured in contents.links
        for link, source in zip(measured.links, measured.sources, strict=True)
    ]
    caption = "Bits per second through one link, by the size of the message. Small messages are all latency."
    files = [source for measured in contents.links for source in measured.sources]
    return Chart("links", "What a link carries", caption, {"lines": lines}, files, tall=True)
