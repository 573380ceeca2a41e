"""Build the charts of a report: what each shows, in numbers, and the files and lines they came from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.measurement.links import compute_rates_by_size
from paceline.measurement.result import PlannedRow
from paceline.measurement.rows import MeasuredRow, drop_failed
from paceline.reports.contents import ReportContents
from paceline.reports.run_view import LossPoint, RunView, compute_loss_differences, find_score, thin_points
from paceline.reports.series import Series, SourceLine, link_name

MOST_POINTS = 24_000
MOST_PER_RUN = 1_000


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    data: dict[str, Any]
    files: Sequence[SourceLine]
    tall: bool = False
    sources: tuple[tuple[str, str], ...] = ()  # (text, address)
    more_sources: int = 0


def round_digits(value: float | None, digits: int = 5) -> float:
    """Few digits: a page is read by people."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else 0.0


STEP_TERMS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "waiting": "waiting for a slower rank",
    "input": "waiting for input",
    "other": "other",
}
"""The parts of a step, in the order in which they are stacked."""
MOST_SOURCES = 12
LEAST_SHARE = 0.003


def build_charts(contents: ReportContents, folder: Path) -> list[Chart]:
    """The charts that there are numbers for, in the order of the page."""
    measured = [row for s in contents.layouts for row in s.measured]
    makers = (
        (_chart_scaling, bool(contents.series)),
        (_chart_breakdown, bool(measured)),
        (_chart_loss, bool(contents.runs)),
        (_chart_difference, contents.same is not None and not contents.same.differing),
        (_chart_memory, any(row.loads.peak_bytes_per_rank for row in measured)),
        (_chart_links, bool(contents.links)),
    )
    found = [make(contents) for make, known in makers if known]
    return [_link_sources(chart, folder) for chart in (*found, *build_curves(contents.runs))]


def _link_sources(chart: Chart, folder: Path) -> Chart:
    distinct = list(dict.fromkeys(chart.files))
    shown = tuple((str(source), source.address(folder)) for source in distinct[:MOST_SOURCES])
    return replace(chart, sources=shown, more_sources=len(distinct) - len(shown))


def _list_row_sources(series: Sequence[Series]) -> list[SourceLine]:
    return [s.sources[row.label] for s in series for row in drop_failed(s.rows)]


def _chart_scaling(contents: ReportContents) -> Chart:
    several = len(contents.series) > 1
    reach = 2 * max([1, *(row.ranks for s in contents.series for row in drop_failed(s.rows))])
    lines = [_build_scaling_line(s, s.name if several else "measured", reach) for s in contents.series]
    one, unit = ("rank", "ranks") if contents.layouts else ("device", "devices")
    spans = any(row.repeats > 1 for s in contents.series for row in drop_failed(s.rows))
    caption = f"Speed-up over one {one}." + " Bars span the repeats." * spans
    if any(line["fit"] for line in lines):
        caption += " The shaded band holds four in five redrawn fits."
    points = [p["high"] for line in lines for p in line["points"]]
    curves = [p[-1] for line in lines for p in (*line["fit"], *line["plan"])]
    highest = max([1.0, *points, *curves])
    top = max(1.1 * highest, min(reach, 1.5 * highest))  # all points are on the chart, those above the ideal too
    top = math.ceil(top) if top > 3 else round_digits(top, 2)
    data = {"lines": lines, "ideal": [[1, 1], [reach, reach]], "reach": reach, "top": top, "unit": unit}
    return Chart("scaling", "How it scales", caption, data, _list_row_sources(contents.series), tall=True)


def _build_scaling_line(s: Series, name: str, reach: int) -> dict[str, Any]:
    law = s.laws[-1] if s.laws else None
    ranks = {row.label: row.ranks for row in s.rows}
    return {
        "name": name,
        "points": [
            {
                "x": row.ranks,
                "y": round_digits(row.speedup),
                "low": round_digits(row.scaling.speedup_low),
                "high": round_digits(row.scaling.speedup_high),
                "label": row.label,
                "source": str(s.sources[row.label]),
            }
            for row in drop_failed(s.rows)
        ],
        "law": law.name if law else "",
        "fit": [
            [p.ranks, round_digits(p.speedup), round_digits(p.low), round_digits(p.high)]
            for p in law.curve
            if p.ranks <= reach
        ]
        if law
        else [],
        "plan": [[ranks[p.label], round_digits(p.speedup)] for p in s.planned if p.speedup is not None],
    }


def _chart_breakdown(contents: ReportContents) -> Chart:
    labels, rows, plans = _label_rows(contents.layouts)
    parts = [(row.parts, row.other_s) for row in rows]
    seconds = [(p.compute_s, p.travelling_s, p.waiting_s, p.data_s, other_s) for p, other_s in parts]
    terms = {
        name: [round_digits(s * 1e3) for s in each]
        for name, each in zip(STEP_TERMS, zip(*seconds, strict=True), strict=True)
    }
    longest = max(map(sum, zip(*terms.values(), strict=True)))
    terms = {name: values for name, values in terms.items() if max(values) > LEAST_SHARE * longest}
    planned = [None if plan is None else round_digits(plan.step_s * 1e3) for plan in plans]
    caption = "Milliseconds of a step, by what the ranks did: medians over the steps of the middle repeat."
    if any(planned):
        caption += " The mark is the step as it was planned."
    data = {"labels": labels, "terms": terms, "names": STEP_TERMS, "plan": planned}
    return Chart("breakdown", "Where the time goes", caption, data, _list_row_sources(contents.layouts))


def _label_rows(series: Sequence[Series]) -> tuple[list[str], list[MeasuredRow], list[PlannedRow | None]]:
    """The rows of all series, each with its name on a chart and its plan."""
    rows = [(s, row) for s in series for row in s.measured]
    labels = [f"{s.name}, {row.label}" if len(series) > 1 else row.label for s, row in rows]
    plans = [{plan.label: plan for plan in s.planned}.get(row.label) for s, row in rows]
    return labels, [row for _, row in rows], plans


def _chart_loss(contents: ReportContents) -> Chart:
    runs = contents.runs
    each = max(60, min(MOST_PER_RUN, MOST_POINTS // len(runs)))
    lines = []
    for run in runs:
        points = [
            [p.step, round_digits(p.loss, 7), p.line] for p in thin_points(run.points, each) if math.isfinite(p.loss)
        ]
        lines.append({"name": run.name, "file": str(run.file), "points": points})
    title, caption = "The same training", "Training loss of every run, drawn over each other."
    if len(runs) == 1:
        title, caption = "Training", "Training loss."
    elif contents.experiments is not None:
        title = "Training"
    return Chart("loss", title, caption, {"lines": lines}, _list_first_lines(runs), tall=True)


def _list_first_lines(runs: Sequence[RunView]) -> list[SourceLine]:
    return [SourceLine(run.file, run.points[0].line) for run in runs]


def _chart_difference(contents: ReportContents) -> Chart:
    first, *others = contents.runs
    each = max(60, min(MOST_PER_RUN // 2, MOST_POINTS // 2 // len(others)))
    lines = []
    for run in others:
        found = [(step, d) for step, d in compute_loss_differences(first, run) if 0 < d < math.inf]
        width = max(1, math.ceil(len(found) / each))
        points = [max(found[i : i + width], key=lambda p: p[1]) for i in range(0, len(found), width)]
        lines.append({"name": run.name, "points": [[step, float(f"{d:.3g}")] for step, d in points]})
    caption = f"Relative difference of the loss to {first.name}. Rounding alone gives about 1e-7 in fp32."
    files = _list_first_lines(contents.runs)
    return Chart("difference", "How far the losses are apart", caption, {"lines": lines}, files)


def _chart_memory(contents: ReportContents) -> Chart:
    labelled = zip(*_label_rows(contents.layouts), strict=True)
    known = [(label, row.loads, plan) for label, row, plan in labelled if row.loads.peak_bytes_per_rank]
    planned = [None if plan is None else round_digits(plan.memory_bytes / 1e6) for _, _, plan in known]
    caption = "Most memory that any rank held: of its device, or of its process on CPU cores."
    if any(planned):
        caption += " The mark is what was planned."
    data = {
        "labels": [label for label, _, _ in known],
        "peaks": [round_digits(max(loads.peak_bytes_per_rank) / 1e6) for _, loads, _ in known],
        "plan": planned,
    }
    return Chart("memory", "Memory", caption, data, _list_row_sources(contents.layouts))


def _chart_links(contents: ReportContents) -> Chart:
    several = len(contents.links) > 1
    lines = [
        {
            "name": f"{measured.name}, {link_name(link)}" if several else link_name(link),
            "points": [[sent, round_digits(bits_s / 1e9)] for sent, bits_s in compute_rates_by_size(link)],
            "source": str(source),
        }
        for measured in contents.links
        for link, source in zip(measured.links, measured.sources, strict=True)
    ]
    caption = "Bits per second through one link, by the size of the message. Small messages are all latency."
    files = [source for measured in contents.links for source in measured.sources]
    return Chart("links", "What a link carries", caption, {"lines": lines}, files, tall=True)


MOST_CURVE_RUNS = 12  # of more, evaluations alone
STRETCHES = 120


def build_curves(runs: Sequence[RunView]) -> list[Chart]:
    """Those that there are numbers for."""
    found = [_chart_evaluation(runs)]
    if len(runs) <= MOST_CURVE_RUNS:
        found += [_chart_rate(runs), _chart_compute(runs), _chart_lr(runs), _chart_grad_norm(runs), _chart_usage(runs)]
    return [chart for chart in found if chart is not None]


def _chart_evaluation(runs: Sequence[RunView]) -> Chart | None:
    scores = {score.name for run in runs if (score := find_score(run)) is not None}
    if len(scores) != 1:
        return None
    name = scores.pop()
    points = {
        run.name: [[e.step, round_digits(e.metrics[name]), e.line] for e in run.evaluations if name in e.metrics]
        for run in runs
    }
    if max(map(len, points.values()), default=0) < 2:
        return None
    lines = [_build_line(run, points[run.name]) for run in runs if points[run.name]]
    sources = [SourceLine(run.file, run.evaluations[0].line) for run in runs if points[run.name]]
    caption = f"{name.capitalize()} of the held-out samples, at each evaluation."
    data = {"lines": lines, "label": name, "marked": True}
    return Chart("evaluation", "Evaluation", caption, data, sources, tall=True)


def _chart_rate(runs: Sequence[RunView]) -> Chart | None:
    lines = [_build_line(run, _median_points(run, run.curves.rate)) for run in runs]
    caption = "Samples per second: medians over stretches of steps, without those that compiled."
    return _build_curve_chart("rate", "Speed as it went on", caption, "samples/s", lines, runs, from_zero=True)


def _chart_compute(runs: Sequence[RunView]) -> Chart | None:
    lines = [
        _build_line(run, [[x, round_digits(100 * y, 4), at] for x, y, at in _median_points(run, run.curves.compute)])
        for run in runs
    ]
    caption = "Share of a step in which the rank computes: the rest is waiting for input or for other ranks."
    return _build_curve_chart(
        "compute", "How much of a step is compute", caption, "% of the step", lines, runs, from_zero=True
    )


def _chart_lr(runs: Sequence[RunView]) -> Chart | None:
    if all(len(set(run.curves.lr)) <= 1 for run in runs):
        return None  # one number says it all, and the spec has it
    lines = [_build_line(run, _thin_values(run, run.curves.lr)) for run in runs]
    return _build_curve_chart("lr", "Learning rate", "Learning rate of every step.", "learning rate", lines, runs)


def _chart_grad_norm(runs: Sequence[RunView]) -> Chart | None:
    lines = [_build_line(run, _thin_values(run, run.curves.grad_norm)) for run in runs]
    caption = "Norm of the gradient before it was clipped: the lowest and the highest of each stretch of steps."
    return _build_curve_chart("gradient", "Gradient norm", caption, "gradient norm", lines, runs)


def _chart_usage(runs: Sequence[RunView]) -> Chart | None:
    """Use, power and memory of the device, each in its own line, of its largest value: 100 is the most it reached."""
    names = {
        "device_share": ("in use", 100.0, "%"),
        "device_watts": ("power", 1.0, "W"),
        "device_bytes": ("memory", 1e-9, "GB"),
    }
    lines = []
    for run in runs:
        for name, (words, scale, unit) in names.items():
            points = [(int(e.get("step", 0)), scale * e[name], e["line"]) for e in run.usage if name in e]
            if len(points) > 1 and (most := max(value for _, value, _ in points)) > 0:
                told = f"{words}, at most {round_digits(most, 3):g} {unit}"
                label = told if len(runs) == 1 else f"{run.name}: {told}"
                of_most = [
                    [step, round_digits(value if unit == "%" else 100 * value / most, 4), at]
                    for step, value, at in points
                ]
                lines.append({"name": label, "file": str(run.file), "points": of_most})
    if not lines:
        return None
    caption = "Of the device of the first rank: use in %, power and memory in % of the most that each reached."
    files = [SourceLine(run.file, run.usage[0]["line"]) for run in runs if run.usage]
    return Chart("usage", "The device", caption, {"lines": lines, "label": "%", "from_zero": True}, files, tall=True)


def _build_curve_chart(
    name: str, title: str, caption: str, label: str, lines: list[dict[str, Any]], runs: Sequence[RunView], **more: Any
) -> Chart | None:
    lines = [line for line in lines if len(line["points"]) > 1]
    files = [SourceLine(run.file, run.points[0].line) for run in runs]
    return Chart(name, title, caption, {"lines": lines, "label": label, **more}, files) if lines else None


def _build_line(run: RunView, points: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {"name": run.name, "file": str(run.file), "points": list(points)}


def _pair_with_steps(run: RunView, values: Iterable[float]) -> list[LossPoint]:
    return [LossPoint(p.step, v, p.line) for p, v in zip(run.points, values, strict=True) if math.isfinite(v)]


def _thin_values(run: RunView, values: Iterable[float]) -> list[list[float]]:
    return [
        [p.step, round_digits(p.loss), p.line] for p in thin_points(_pair_with_steps(run, values), MOST_PER_RUN // 2)
    ]


def _median_points(run: RunView, values: Iterable[float]) -> list[list[float]]:
    points = _pair_with_steps(run, values)
    width = max(1, math.ceil(len(points) / STRETCHES))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [
        [g[len(g) // 2].step, round_digits(statistics.median(p.loss for p in g)), g[len(g) // 2].line] for g in groups
    ]
