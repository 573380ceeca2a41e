"""What a run did as it went on: evaluation, rate, share of compute, learning rate, gradient norm, use of the device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.reporting.chart import MOST_PER_RUN, Chart, short
from paceline.reporting.experiments import score_of
from paceline.reporting.run_view import Point, RunView, thinned
from paceline.reporting.series import FileLine

MOST_RUNS = 12
"""Whose every curve is drawn; of more, evaluations alone."""
STRETCHES = 120
"""Medians that are drawn of what jumps from step to step."""


def curves(runs: Sequence[RunView]) -> list[Chart]:
    """Those that there are numbers for."""
    found = [_evaluation(runs)]
    if len(runs) <= MOST_RUNS:
        found += [_rate(runs), _compute(runs), _lr(runs), _grad_norm(runs), _usage(runs)]
    return [chart for chart in found if chart is not None]


def _evaluation(runs: Sequence[RunView]) -> Chart | None:
    scores = {score.name for run in runs if (score := score_of(run)) is not None}
    if len(scores) != 1:
        return None
    name = scores.pop()
    points = {
        run.name: [[e.step, short(e.metrics[name]), e.line] for e in run.evaluations if name in e.metrics]
        for run in runs
    }
    if max(map(len, points.values()), default=0) < 2:
        return None
    lines = [_line(run, points[run.name]) for run in runs if points[run.name]]
    sources = [FileLine(run.file, run.evaluations[0].line) for run in runs if points[run.name]]
    caption = f"{name.capitalize()} of the held-out samples, at each evaluation."
    data = {"lines": lines, "label": name, "marked": True}
    return Chart("evaluation", "Evaluation", caption, data, sources, tall=True)


def _rate(runs: Sequence[RunView]) -> Chart | None:
    lines = [_line(run, _medians(run, run.curves.rate)) for run in runs]
    caption = "Samples per second: medians over stretches of steps, without those that compiled."
    return _chart("rate", "Speed as it went on", caption, "samples/s", lines, runs, from_zero=True)


def _compute(runs: Sequence[RunView]) -> Chart | None:
    lines = [_line(run, [[x, short(100 * y, 4), at] for x, y, at in _medians(run, run.curves.compute)]) for run in runs]
    caption = "Share of a step in which the rank computes: the rest is waiting for input or for other ranks."
    return _chart("compute", "How much of a step is compute", caption, "% of the step", lines, runs, from_zero=True)


def _lr(runs: Sequence[RunView]) -> Chart | None:
    if all(len(set(run.curves.lr)) <= 1 for run in runs):
        return None  # one number says it all, and the spec has it
    lines = [_line(run, _thinned(run, run.curves.lr)) for run in runs]
    return _chart("lr", "Learning rate", "Learning rate of every step.", "learning rate", lines, runs)


def _grad_norm(runs: Sequence[RunView]) -> Chart | None:
    lines = [_line(run, _thinned(run, run.curves.grad_norm)) for run in runs]
    caption = "Norm of the gradient before it was clipped: the lowest and the highest of each stretch of steps."
    return _chart("gradient", "Gradient norm", caption, "gradient norm", lines, runs)


def _usage(runs: Sequence[RunView]) -> Chart | None:
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
                told = f"{words}, at most {short(most, 3):g} {unit}"
                label = told if len(runs) == 1 else f"{run.name}: {told}"
                of_most = [
                    [step, short(value if unit == "%" else 100 * value / most, 4), at] for step, value, at in points
                ]
                lines.append({"name": label, "file": str(run.file), "points": of_most})
    if not lines:
        return None
    caption = "Of the device of the first rank: use in %, power and memory in % of the most that each reached."
    files = [FileLine(run.file, run.usage[0]["line"]) for run in runs if run.usage]
    return Chart("usage", "The device", caption, {"lines": lines, "label": "%", "from_zero": True}, files, tall=True)


def _chart(
    name: str, title: str, caption: str, label: str, lines: list[dict[str, Any]], runs: Sequence[RunView], **more: Any
) -> Chart | None:
    lines = [line for line in lines if len(line["points"]) > 1]
    files = [FileLine(run.file, run.points[0].line) for run in runs]
    return Chart(name, title, caption, {"lines": lines, "label": label, **more}, files) if lines else None


def _line(run: RunView, points: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {"name": run.name, "file": str(run.file), "points": list(points)}


def _with(run: RunView, values: Iterable[float]) -> list[Point]:
    return [Point(p.step, v, p.line) for p, v in zip(run.points, values, strict=True) if math.isfinite(v)]


def _thinned(run: RunView, values: Iterable[float]) -> list[list[float]]:
    return [[p.step, short(p.loss), p.line] for p in thinned(_with(run, values), MOST_PER_RUN // 2)]


def _medians(run: RunView, values: Iterable[float]) -> list[list[float]]:
    points = _with(run, values)
    width = max(1, math.ceil(len(points) / STRETCHES))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [[g[len(g) // 2].step, short(statistics.median(p.loss for p in g)), g[len(g) // 2].line] for g in groups]
