"""Build the charts of a report: what each shows, in numbers, and the files and lines they came from."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from paceline.measurement.result import PlannedRow
from paceline.measurement.rows import MeasuredRow, drop_failed
from paceline.reports.contents import ReportContents
from paceline.reports.run_view import LossPoint, RunView, compute_loss_differences, split_stretches, thin_points
from paceline.reports.series import Series, SourceLine
from paceline.runlog.summary import find_score

MAX_POINTS = 24_000
MAX_PER_RUN = 1_000


@dataclass(frozen=True)
class Chart:
    """A picture, in numbers: `data` has its kind (lines, bars, scaling or scatter) and what that kind takes."""

    name: str
    title: str
    caption: str
    data: dict[str, Any]
    sources: Sequence[SourceLine] = ()
    tall: bool = False


def round_digits(value: float | None, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else 0.0


STEP_TERMS: dict[str, str] = {
    "compute": "compute",
    "exposed": "exposed communication",
    "waiting": "waiting for a slower rank",
    "input": "waiting for input",
    "other": "other",
}
"""The parts of a step, in the order in which they are stacked."""
LEAST_SHARE = 0.003


def build_charts(contents: ReportContents) -> list[Chart]:
    measured = [row for s in contents.layouts for row in s.measured]
    makers = (
        (_chart_scaling, bool(contents.series)),
        (_chart_breakdown, bool(measured)),
        (_chart_epochs, any(len(run.epoch_s) > 1 for run in contents.runs)),
        (_chart_loss, bool(contents.runs)),
        (_chart_difference, contents.same is not None and not contents.same.differing),
        (_chart_memory, any(row.loads.peak_bytes for row in measured)),
    )
    return [*(make(contents) for make, known in makers if known), *build_curves(contents.runs)]


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
        caption += " The shaded band holds four in five bootstrap fits."
    points = [p["high"] for line in lines for p in line["points"]]
    curves = [p[-1] for line in lines for p in (*line["fit"], *line["plan"])]
    highest = max([1.0, *points, *curves])
    top = max(1.1 * highest, min(reach, 1.5 * highest))  # all points are on the chart, those above the ideal too
    top = math.ceil(top) if top > 3 else round_digits(top, 2)
    data = {"kind": "scaling", "lines": lines, "reach": reach, "top": top, "unit": unit}
    return Chart("scaling", "How it scales", caption, data, _list_row_sources(contents.series), tall=True)


def _build_scaling_line(s: Series, name: str, reach: int) -> dict[str, Any]:
    law = s.laws[-1] if s.laws else None
    ranks = {row.label: row.ranks for row in s.rows}
    points = [
        {
            "x": row.ranks,
            "y": round_digits(row.speedup),
            "low": round_digits(row.scaling.speedup_low),
            "high": round_digits(row.scaling.speedup_high),
            "label": row.label,
            "source": str(s.sources[row.label]),
        }
        for row in drop_failed(s.rows)
    ]
    curve = [p for p in law.curve if p.ranks <= reach] if law else []
    return {
        "name": name,
        "points": points,
        "law": law.description if law else "",
        "fit": [[p.ranks, *map(round_digits, p[1:])] for p in curve],
        "plan": [[ranks[p.label], round_digits(p.speedup)] for p in s.planned if p.speedup is not None],
    }


def _chart_breakdown(contents: ReportContents) -> Chart:
    labels, rows, plans = _label_rows(contents.layouts)
    seconds = [row.terms | {"other": row.other_s} for row in rows]
    terms = {name: [round_digits(row[name] * 1e3) for row in seconds] for name in STEP_TERMS}
    longest = max(map(sum, zip(*terms.values(), strict=True)))
    terms = {name: values for name, values in terms.items() if max(values) > LEAST_SHARE * longest}
    planned = [None if plan is None else round_digits(plan.step_s * 1e3) for plan in plans]
    caption = "Milliseconds of a step, by what the ranks did: medians over the steps of the middle repeat."
    if any(planned):
        caption += " The mark is the step as it was planned."
    names = {name: STEP_TERMS[name] for name in terms}
    data = {"kind": "bars", "labels": labels, "terms": terms, "names": names, "plan": planned, "unit": "ms per step"}
    return Chart("breakdown", "Where the time goes", caption, data, _list_row_sources(contents.layouts))


def _chart_epochs(contents: ReportContents) -> Chart:
    """Chart the seconds of each epoch: of its steps, without evaluations and checkpoints."""
    runs = [run for run in contents.runs if len(run.epoch_s) > 1]
    lines = [_build_line(run, [[i, round_digits(s)] for i, s in enumerate(run.epoch_s, 1)]) for run in runs]
    data = draw_lines(lines, "s per epoch", unit="epoch", from_zero=True, marked=True)
    caption = "Seconds of the steps of each whole epoch, without evaluations and checkpoints."
    return Chart("epochs", "Time per epoch", caption, data, _list_first_lines(runs))


def _label_rows(series: Sequence[Series]) -> tuple[list[str], list[MeasuredRow], list[PlannedRow | None]]:
    rows = [(s, row) for s in series for row in s.measured]
    times = Counter(row.label for _, row in rows)
    labels = [f"{s.name}, {row.label}" if times[row.label] > 1 else row.label for s, row in rows]
    plans = [{plan.label: plan for plan in s.planned}.get(row.label) for s, row in rows]
    return labels, [row for _, row in rows], plans


def _chart_loss(contents: ReportContents) -> Chart:
    runs = contents.runs
    each = max(60, min(MAX_PER_RUN, MAX_POINTS // len(runs)))
    thinned = {run.name: [p for p in thin_points(run.points, each) if math.isfinite(p.loss)] for run in runs}
    lines = [_build_line(run, [[p.step, round_digits(p.loss, 7), p.line] for p in thinned[run.name]]) for run in runs]
    title, caption = "The same training", "Training loss of every run, drawn over each other."
    if len(runs) == 1:
        title, caption = "Training", "Training loss."
    elif contents.experiments is not None:
        title = "Training"
    data = draw_lines(lines, "loss", overlaid=True)
    return Chart("loss", title, caption, data, _list_first_lines(runs), tall=True)


def _list_first_lines(runs: Sequence[RunView]) -> list[SourceLine]:
    return [SourceLine(run.file, run.points[0].line) for run in runs]


def _chart_difference(contents: ReportContents) -> Chart:
    first, *others = contents.runs
    each = max(60, min(MAX_PER_RUN // 2, MAX_POINTS // 2 // len(others)))
    lines: list[dict[str, Any]] = [{"name": first.name, "points": []}]  # it has the first colour
    for run in others:
        found = [(step, d) for step, d in compute_loss_differences(first, run) if 0 < d < math.inf]
        points = [max(some, key=lambda p: p[1]) for some in split_stretches(found, each)]
        lines.append({"name": run.name, "points": [[step, round_digits(d, 3)] for step, d in points]})
    caption = f"Relative difference of the loss to {first.name}. Rounding alone gives about 1e-7 in fp32."
    data = draw_lines(lines, "relative difference", log_y=True)
    return Chart("difference", "How far the losses are apart", caption, data, _list_first_lines(contents.runs))


def _chart_memory(contents: ReportContents) -> Chart:
    known = [found for found in zip(*_label_rows(contents.layouts), strict=True) if found[1].loads.peak_bytes]
    planned = [None if plan is None else round_digits(plan.memory_bytes / 1e6) for *_, plan in known]
    caption = "Peak memory of any rank: of its device, or of its process on CPU cores."
    if any(planned):
        caption += " The mark is what was planned."
    peaks = [round_digits((row.loads.peak_bytes or 0) / 1e6) for _, row, _ in known]
    bars = {"labels": [label for label, *_ in known], "terms": {"compute": peaks}, "names": {"compute": "measured"}}
    data = {"kind": "bars", **bars, "plan": planned, "unit": "MB on the fullest rank"}
    return Chart("memory", "Memory", caption, data, _list_row_sources(contents.layouts))


MAX_CURVE_RUNS = 12  # of more, evaluations alone
STRETCHES = 120


CURVES = (
    (
        *("rate", "Speed over time", "samples/s"),
        "Samples per second: medians over stretches of steps, without those that compiled.",
    ),
    (
        *("compute", "How much of a step is compute", "% of the step"),
        "Share of a step in which the rank computes: the rest is waiting for input or for other ranks.",
    ),
    ("lr", "Learning rate", "learning rate", "Learning rate of every step."),
    (
        *("gradient", "Gradient norm", "gradient norm"),
        "Norm of the gradient before it was clipped: the lowest and the highest of each stretch of steps.",
    ),
)
"""Name, title, axis and caption."""
FROM_ZERO = ("rate", "compute")


def build_curves(runs: Sequence[RunView]) -> list[Chart]:
    found = [_chart_evaluation(runs)]
    if len(runs) <= MAX_CURVE_RUNS:
        found += [*(_chart_curve(runs, *curve) for curve in CURVES), _chart_usage(runs)]
    return [chart for chart in found if chart is not None]


def _chart_curve(runs: Sequence[RunView], name: str, title: str, label: str, caption: str) -> Chart | None:
    if name == "lr" and all(len(set(run.curves[name])) <= 1 for run in runs):
        return None  # the spec has it
    reduce = _median_points if name in FROM_ZERO else _thin_values
    lines = [_build_line(run, reduce(run, run.curves[name])) for run in runs]
    lines = [line for line in lines if len(line["points"]) > 1]
    data = draw_lines(lines, label, from_zero=name in FROM_ZERO)
    return Chart(name, title, caption, data, _list_first_lines(runs)) if lines else None


def _chart_evaluation(runs: Sequence[RunView]) -> Chart | None:
    scores = {score.name for run in runs if (score := find_score(run.summary)) is not None}
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
    return Chart("evaluation", "Evaluation", caption, draw_lines(lines, name, marked=True), sources, tall=True)


USAGE = {
    "device_share": ("in use", 100.0, "%"),
    "device_watts": ("power", 1.0, "W"),
    "device_bytes": ("memory", 1e-9, "GB"),
}


def _chart_usage(runs: Sequence[RunView]) -> Chart | None:
    lines = []
    for run, (name, (title, scale, unit)) in product(runs, USAGE.items()):
        points = [(int(e.get("step", 0)), scale * e[name], e["line"]) for e in run.usage if name in e]
        most = max((value for _, value, _ in points), default=0.0)
        if len(points) > 1 and most > 0:
            label = f"{title}, at most {round_digits(most, 3):g} {unit}"
            line = _build_line(
                run, [[step, round_digits(v if unit == "%" else 100 * v / most, 4), at] for step, v, at in points]
            )
            lines.append(line | {"name": label if len(runs) == 1 else f"{run.name}: {label}"})
    if not lines:
        return None
    caption = "Of the device of the first rank: use in %, power and memory in % of the most that each reached."
    files = [SourceLine(run.file, run.usage[0]["line"]) for run in runs if run.usage]
    return Chart("usage", "The device", caption, draw_lines(lines, "%", from_zero=True), files, tall=True)


def draw_lines(lines: Sequence[dict[str, Any]], label: str, **options: bool | str) -> dict[str, Any]:
    """Return the data of a chart of lines.

    Options: `unit` of the x axis (step), `from_zero`, `marked` points, `log_y`, and `overlaid` lines, of which
    the first are wide, so that equal ones all show.
    """
    return {"kind": "lines", "lines": lines, "label": label, "unit": "step", **options}


def _build_line(run: RunView, points: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {"name": run.name, "file": str(run.file), "points": list(points)}


def _pair_with_steps(run: RunView, values: Iterable[float]) -> list[LossPoint]:
    return [LossPoint(p.step, v, p.line) for p, v in zip(run.points, values, strict=True) if math.isfinite(v)]


def _thin_values(run: RunView, values: Iterable[float]) -> list[list[float]]:
    thinned = thin_points(_pair_with_steps(run, values), MAX_PER_RUN // 2)
    return [[p.step, round_digits(p.loss), p.line] for p in thinned]


def _median_points(run: RunView, values: Iterable[float]) -> list[list[float]]:
    found = []
    for group in split_stretches(_pair_with_steps(run, values), STRETCHES):
        middle = group[len(group) // 2]
        found.append([middle.step, round_digits(statistics.median(p.loss for p in group)), middle.line])
    return found
