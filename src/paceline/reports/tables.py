"""The tables of a report, as cells of text: the same in the page, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.io.format import duration, format_metrics, number, percent, size
from paceline.measurement.rows import FailedRow, MeasuredRow, TimedRow, drop_failed, has_passes
from paceline.measurement.tables import DEVICE_HEAD, format_device_cells
from paceline.reports.contents import ReportContents
from paceline.reports.run_view import (
    MOST_KEYS,
    Experiments,
    describe_other_keys,
    format_experiment_row,
    list_experiment_columns,
)
from paceline.reports.series import LinkMeasurement, Series
from paceline.runlog.summary import describe_baseline, select_class_results

SCALING_NOTES = {
    "strong": "The same batch on every row.",
    "weak": "The batch grows with the ranks.",
    "passes": "Each step is a pass over all samples.",
    "times": "",
}


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int | None = None
    """The row to take."""
    failed: tuple[int, ...] = ()
    """Rows that have a reason, in their second cell, and no numbers."""
    left: int = 1
    """Columns of text; the others are numbers."""
    note: str = ""


def build_tables(contents: ReportContents) -> list[Table]:
    found = []
    for s in contents.series:
        name = f": {s.name}" if len(contents.series) > 1 else ""
        found.append(_build_scaling(s, name))
        if s.timed:
            found.append(_build_parts(s, name))
        if any(row.resources.device for row in s.measured):
            found.append(_build_devices(s, name))
        if s.planned:
            found.append(_build_plan(s, name))
        found.append(_build_benefit(s, name))
        if s.laws and s.laws[-1].curve[-1].ranks > max(row.ranks for row in drop_failed(s.rows)):
            found.append(_build_laws(s, name))
    found += [_build_links(m, f": {m.name}" if len(contents.links) > 1 else "") for m in contents.links]
    if contents.experiments is not None:
        found.append(_build_experiments(contents.experiments))
    elif contents.runs:
        found.append(_build_runs(contents))
    if len(contents.runs) == 1 and (ended := contents.runs[0].summary) is not None:
        found += _build_classes({**ended.evaluation.metrics, **ended.evaluation.arrays})
    return found


def _find_chosen(rows: Sequence[TimedRow | FailedRow]) -> int | None:
    return next((i for i, row in enumerate(rows) if isinstance(row, TimedRow) and row.recommended), None)


def _build_scaling(s: Series, name: str) -> Table:
    head = ("", "step" if s.timed else "time", "spread", "speed-up", "efficiency", "samples/s", "tokens/s")
    columns = 7 if any(row.tokens_per_s for row in s.measured) else 6 if s.timed else 5
    cells = tuple(_format_scaling(row)[:columns] for row in s.rows)
    failed = tuple(i for i, row in enumerate(s.rows) if isinstance(row, FailedRow))
    note = SCALING_NOTES["passes" if has_passes(s.rows) else s.kind]
    return Table("scaling", f"Scaling{name}", head[:columns], cells, _find_chosen(s.rows), failed, note=note)


def _format_scaling(row: TimedRow | FailedRow) -> tuple[str, ...]:
    if isinstance(row, FailedRow):
        return (row.label, f"✗ {row.failed or 'no numbers'}", "", "", "", "", "")
    tokens_per_s = row.tokens_per_s if isinstance(row, MeasuredRow) else None
    return (
        row.label,
        duration(row.step_s),
        f"{duration(row.step_s_low)} to {duration(row.step_s_high)}" if row.repeats > 1 else "–",
        _format_times(row.speedup),
        percent(row.efficiency),
        number(row.samples_per_s, 3),
        number(tokens_per_s, 3) if tokens_per_s else "–",
    )


def _build_parts(s: Series, name: str) -> Table:
    head = ("", "compute", "in flight", "exposed", "input", "R", "slowest rank")
    note = "R is compute over communication in flight; exposed is the part of it that nothing hides."
    rows = tuple(map(_format_parts, s.measured))
    return Table("times", f"The four times{name}", head, rows, _find_chosen(s.measured), note=note)


def _format_parts(row: MeasuredRow) -> tuple[str, ...]:
    parts, slow, ratio = row.parts, row.loads.slowest, row.compute_over_comm
    return (
        row.label,
        duration(parts.compute_s),
        duration(parts.comm_s) if parts.comm_s else "–",
        duration(parts.exposed_s) if parts.exposed_s else "–",
        duration(parts.data_s),
        number(ratio, 3) if ratio is not None else "–",
        f"rank {slow.rank}, ×{number(slow.over_others, 3)}" if slow else "–",
    )


def _build_devices(s: Series, name: str) -> Table:
    on_devices = [row for row in s.measured if row.resources.device]
    rows = tuple((row.label, *format_device_cells(row.resources, "–")) for row in on_devices)
    note = "MFU is the share of the device's peak that the arithmetic of the model reaches, attention counted in full; "
    note += "busy is the share of the time in which any kernel runs."
    return Table("devices", f"Devices{name}", ("", *DEVICE_HEAD), rows, _find_chosen(on_devices), left=2, note=note)


def _build_plan(s: Series, name: str) -> Table:
    by_label = {row.label: row for row in s.measured}
    rows = [
        (
            row.label,
            f"{duration(row.step_s)} / {duration(plan.step_s)}",
            f"{100 * plan.residual:+.0f} %",
            f"{duration(row.parts.compute_s)} / {duration(plan.compute_s)}",
            f"{duration(row.parts.exposed_s)} / {duration(plan.exposed_s)}",
            f"{_format_times(row.speedup)} / {_format_times(plan.speedup)}",
            f"{size(max(row.loads.peak_bytes_per_rank, default=0))} / {size(plan.memory_bytes)}",
        )
        for plan, row in ((plan, by_label[plan.label]) for plan in s.planned)
    ]
    head = ("measured / planned", "step", "off by", "compute", "exposed", "speed-up", "memory")
    note = "; ".join(f"{plan.label}: {plan.off}" for plan in s.planned if plan.off)
    if not s.planned[0].calibrated:
        note = "Planned by rules of thumb, without a calibration of this machine. " + note
    return Table("plan", f"Measured against planned{name}", head, tuple(rows), note=note)


def _build_benefit(s: Series, name: str) -> Table:
    rows = drop_failed(s.rows)
    usd = (2 if s.timed else 1) if s.usd_per_device_hour is not None else 0
    cells = [
        (
            row.label,
            duration(row.cost.hours * 3600) if row.cost.hours is not None else "–",
            number(row.cost.device_hours, 3) if row.cost.device_hours is not None else "–",
            *(_format_usd(amount) for amount in (row.cost.cost_usd, row.cost.usd_per_million_samples)[:usd]),
        )
        for row in rows
    ]
    head = ("", "time", "device-hours", *("USD", "USD per million samples")[:usd])
    note = f"For the whole run of {s.total_samples:,} samples" if s.timed and s.total_samples else "For one run"
    note += f", at {s.usd_per_device_hour:g} USD per device and hour." if usd else "."
    return Table("benefit", f"Cost and benefit{name}", head, tuple(cells), _find_chosen(rows), note=note)


def _build_laws(s: Series, name: str) -> Table:
    most = max(row.ranks for row in drop_failed(s.rows))
    rows = []
    for law in s.laws:
        values = ", ".join(f"{key} {number(value, 3)}" for key, value in law.parameters.items())
        points = [law.beyond(ranks) for ranks in (2 * most, 4 * most)]
        bands = [
            f"{_format_times(p.speedup)} ({number(p.low, 3)} to {number(p.high, 3)})" if p else "–" for p in points
        ]
        ceiling = f"at most {_format_times(law.ceiling_high)}" if law.ceiling_high else "–"
        rows.append((law.name, values, percent(law.error), *bands, ceiling))
    head = ("law", "parameters", "off by", f"on {2 * most}", f"on {4 * most}", "ceiling")
    return Table("fits", f"Beyond what was measured{name}", head, tuple(rows), left=2)


def _build_runs(contents: ReportContents) -> Table:
    rows = [
        (
            run.name,
            run.status,
            str(run.ranks),
            f"{len(run.points):,}",
            number(run.points[0].loss),
            number(run.summary.loss_last if run.summary is not None else run.points[-1].loss),
            format_metrics(run.summary.evaluation.metrics if run.summary is not None else {}) or "–",
        )
        for run in contents.runs
    ]
    head = ("run", "status", "ranks", "steps", "first loss", "last loss", "evaluation")
    return Table("runs", "Runs", head, tuple(rows), left=2)


def _build_experiments(found: Experiments) -> Table:
    rows = tuple(format_experiment_row(found, place) for place in range(len(found.runs)))
    note = f"The best {found.score} of each run. " if found.score else ""
    left = 2 + len(found.keys[:MOST_KEYS])
    return Table(
        "experiments",
        "What changed, and what came of it",
        list_experiment_columns(found),
        rows,
        found.best,
        left=left,
        note=(note + describe_other_keys(found)).strip(),
    )


def _build_classes(event: Mapping[str, Any]) -> Iterator[Table]:
    """What the last evaluation found for each class, and which ones were taken for which."""
    results, left = select_class_results(event)
    if not results:
        return
    notes = [words] if (words := describe_baseline(event)) else []
    notes += [f"{left:,} more are in summary.json; these have the lowest F1"] if left else []
    note = "".join(f"{words[0].upper()}{words[1:]}. " for words in notes).rstrip()
    head = ("class", "precision", "recall", "F1", "samples")
    yield Table("classes", "Results of each class", head, tuple(r.cells() for r in results), note=note)
    if not left and (confusion := event.get("confusion")):
        names = [result.name for result in results]
        rows = tuple((name, *map(number, row)) for name, row in zip(names, confusion, strict=False))
        note = "A row for each class, a column for what its samples were taken for."
        yield Table("confusion", "Confusion matrix", ("", *names), rows, note=note)


def _build_links(measured: LinkMeasurement, name: str) -> Table:
    rows = [
        (link.name, link.between, str(link.ranks), duration(link.latency_s), link.rate, size(link.sizes_bytes[-1]))
        for link in measured.links
    ]
    head = ("collective", "between", "ranks", "latency", "bandwidth", "up to")
    note = "Bandwidth is the slope between the largest sizes, as bits through one link."
    return Table("links", f"Links{name}", head, tuple(rows), left=2, note=note)


def _format_times(value: float | None) -> str:
    return "–" if value is None else f"{number(value, 3)}×"


def _format_usd(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if value >= 1 else number(value, 3)
