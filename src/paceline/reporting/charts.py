"""The exhibits of a report: what each chart shows, in numbers, and the files and lines they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.measuring.diagnose import NAMES
from paceline.measuring.links import bits_s_by_size
from paceline.reporting.between import called
from paceline.reporting.contents import Contents, link
from paceline.reporting.curve import RunView, apart, thinned
from paceline.reporting.series import Place, Series

TERMS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "waiting": "waiting for a slower rank",
    "input": "waiting for input",
    "other": "other",
}
"""The parts of a step, in the order in which they are stacked."""
MOST_POINTS = 24_000
MOST_PER_RUN = 1_000
MOST_SOURCES = 12
LEAST_SHARE = 0.003
"""Of the longest step: a part that is never more than this cannot be seen."""


@dataclass(frozen=True)
class Exhibit:
    name: str
    title: str
    caption: str
    data: dict[str, Any]
    sources: tuple[tuple[str, str], ...]
    """(text, address) of the files and lines."""
    more_sources: int = 0
    tall: bool = field(default=False)


def exhibits(contents: Contents, folder: Path) -> list[Exhibit]:
    """The charts that there are numbers for, in the order of the page."""
    found = []
    if contents.series:
        found.append(_scaling(contents, folder))
    if any(row.step_s for s in contents.layouts for row in s.rows):
        found.append(_breakdown(contents, folder))
    if contents.runs:
        found.append(_loss(contents, folder))
        if len(contents.runs) > 1 and contents.same and "differ in" not in contents.same:
            found.append(_difference(contents, folder))
    if any(row.peak_bytes_per_rank for s in contents.layouts for row in s.rows):
        found.append(_memory(contents, folder))
    if contents.links:
        found.append(_links(contents, folder))
    return found


def _sources(places: Sequence[Place], folder: Path) -> tuple[tuple[tuple[str, str], ...], int]:
    distinct = list(dict.fromkeys(places))
    shown = tuple(link(place, folder) for place in distinct[:MOST_SOURCES])
    return shown, max(0, len(distinct) - MOST_SOURCES)


def _row_places(series: Sequence[Series]) -> list[Place]:
    return [s.places[row.label] for s in series for row in s.rows if row.step_s]


def _label(series: Series, label: str, several: bool) -> str:
    return f"{series.name}, {label}" if several else label


def _scaling(contents: Contents, folder: Path) -> Exhibit:
    several = len(contents.series) > 1
    lines: list[dict[str, Any]] = []
    most = 1
    for s in contents.series:
        done = [row for row in s.rows if row.speedup is not None]
        most = max([most, *(row.ranks for row in done)])
        points = [
            {
                "x": row.ranks,
                "y": _r(row.speedup),
                "low": _r(row.speedup_low),
                "high": _r(row.speedup_high),
                "label": row.label,
                "source": link(s.places[row.label], folder)[0],
            }
            for row in done
        ]
        fit = s.fits[-1] if s.fits else None
        lines.append(
            {
                "name": s.name if several else "measured",
                "points": points,
                "law": NAMES[fit.law] if fit else "",
                "fit": [[n, _r(y), _r(low), _r(high)] for n, y, low, high in fit.curve] if fit else [],
                "plan": [
                    [row.ranks, _r(p.speedup)]
                    for p in s.planned
                    for row in s.rows
                    if row.label == p.label and p.speedup is not None
                ],
            }
        )
    reach = 2 * most
    for line in lines:
        line["fit"] = [point for point in line["fit"] if point[0] <= reach]
    one = "rank" if contents.layouts else "device"
    caption = f"Speed-up over one {one}. Bars span the repeats; the shaded band holds four in five redrawn fits."
    sources, more = _sources(_row_places(contents.series), folder)
    unit = "ranks" if contents.layouts else "devices"
    data = {"lines": lines, "ideal": [[1, 1], [reach, reach]], "reach": reach, "unit": unit}
    return Exhibit("scaling", "How it scales", caption, data, sources, more, tall=True)


def parts_of(row: Any) -> dict[str, float]:
    """Seconds of a step, by part."""
    waiting = row.waiting_s or 0.0
    return {
        "compute": row.compute_s or 0.0,
        "exposed": max(0.0, (row.exposed_s or 0.0) - waiting),
        "waiting": waiting,
        "input": row.data_s or 0.0,
        "other": row.other_s,
    }


def _breakdown(contents: Contents, folder: Path) -> Exhibit:
    series = contents.layouts
    several = len(series) > 1
    labels, terms, plans = [], {name: [] for name in TERMS}, []  # type: ignore[var-annotated]
    for s in series:
        planned = {p.label: p for p in s.planned}
        for row in s.rows:
            if not row.step_s:
                continue
            labels.append(_label(s, row.label, several))
            for name, seconds in parts_of(row).items():
                terms[name].append(_r(seconds * 1e3))
            plan = planned.get(row.label)
            plans.append(None if plan is None else _r(plan.step_s * 1e3))
    longest = max(map(sum, zip(*terms.values(), strict=True)))
    terms = {name: values for name, values in terms.items() if max(values) > LEAST_SHARE * longest}
    caption = "Milliseconds of a step, by what the ranks did: medians over the steps and the repeats."
    if any(plans):
        caption += " The mark is the step as it was planned."
    sources, more = _sources(_row_places(series), folder)
    return Exhibit(
        "breakdown",
        "Where the time goes",
        caption,
        {"labels": labels, "terms": terms, "names": TERMS, "plan": plans},
        sources,
        more,
    )


def _loss(contents: Contents, folder: Path) -> Exhibit:
    runs = contents.runs
    each = max(60, min(MOST_PER_RUN, MOST_POINTS // len(runs)))
    lines = []
    for run in runs:
        points = [[p.step, _r(p.loss, 7), p.line] for p in thinned(run.points, each) if math.isfinite(p.loss)]
        lines.append({"name": run.name, "file": str(run.file), "points": points})
    caption = "Training loss of every run, drawn over each other."
    sources, more = _sources([_span(run) for run in runs], folder)
    return Exhibit("loss", "The same training", caption, {"lines": lines}, sources, more, tall=True)


def _span(run: RunView) -> Place:
    return Place(run.file, run.points[0].line if run.points else None)


def _difference(contents: Contents, folder: Path) -> Exhibit:
    first, *others = contents.runs
    each = max(60, min(MOST_PER_RUN // 2, MOST_POINTS // 2 // len(others)))
    lines = []
    for run in others:
        found = [(step, d) for step, d in apart(first, run) if d > 0]
        width = max(1, math.ceil(len(found) / each))
        points = [max(found[i : i + width], key=lambda p: p[1]) for i in range(0, len(found), width)]
        lines.append({"name": run.name, "points": [[step, float(f"{d:.3g}")] for step, d in points]})
    caption = f"Relative difference of the loss to {first.name}. Rounding alone gives about 1e-7 in fp32."
    sources, more = _sources([_span(run) for run in contents.runs], folder)
    return Exhibit("difference", "How far the losses are apart", caption, {"lines": lines}, sources, more)


def _memory(contents: Contents, folder: Path) -> Exhibit:
    series = contents.layouts
    several = len(series) > 1
    labels, peaks, plans = [], [], []
    for s in series:
        planned = {p.label: p for p in s.planned}
        for row in s.rows:
            if row.peak_bytes_per_rank:
                labels.append(_label(s, row.label, several))
                peaks.append(_r(max(row.peak_bytes_per_rank) / 1e6))
                plan = planned.get(row.label)
                plans.append(None if plan is None else _r(plan.memory_bytes / 1e6))
    caption = "Most memory that any rank held: of its device, or of its process on CPU cores."
    if any(plans):
        caption += " The mark is what was planned."
    sources, more = _sources(_row_places(series), folder)
    return Exhibit("memory", "Memory", caption, {"labels": labels, "peaks": peaks, "plan": plans}, sources, more)


def _links(contents: Contents, folder: Path) -> Exhibit:
    several = len(contents.links) > 1
    lines = [
        {
            "name": f"{b.name}, {called(one)}" if several else called(one),
            "points": [[sent, _r(bits_s / 1e9)] for sent, bits_s in bits_s_by_size(one)],
            "source": link(place, folder)[0],
        }
        for b in contents.links
        for one, place in zip(b.links, b.places, strict=True)
    ]
    caption = "Bits per second through one link, by the size of the message. Small messages are all latency."
    sources, more = _sources([place for b in contents.links for place in b.places], folder)
    return Exhibit("links", "What a link carries", caption, {"lines": lines}, sources, more, tall=True)


def _r(value: float | None, digits: int = 5) -> float:
    """Few digits: a page is read by people."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else 0.0
