"""The tables of a report, as cells of text: the same in the page, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measuring import devices
from paceline.measuring.diagnose import NAMES
from paceline.measuring.rows import Row
from paceline.record.units import duration, number, percent, size
from paceline.reporting.between import Between
from paceline.reporting.contents import Contents
from paceline.reporting.series import Series


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int | None = None
    """The row to take."""
    left: int = 1
    """Columns of text; the others are numbers."""
    note: str = ""


def tables(contents: Contents) -> list[Table]:
    found = []
    for s in contents.series:
        name = f": {s.name}" if len(contents.series) > 1 else ""
        found.append(_scaling(s, name))
        if s.timed:
            found.append(_parts(s, name))
        if any(row.device for row in s.rows):
            found.append(_devices(s, name))
        if s.planned:
            found.append(_plan(s, name))
        found.append(_benefit(s, name))
        if s.fits:
            found.append(_fits(s, name))
    found += [_links(b, f": {b.name}" if len(contents.links) > 1 else "") for b in contents.links]
    if contents.runs:
        found.append(_runs(contents))
    return found


def _chosen(rows: Sequence[Row]) -> int | None:
    return next((i for i, row in enumerate(rows) if row.recommended), None)


def _scaling(s: Series, name: str) -> Table:
    head = ("", "time" if not s.timed else "step", "spread", "speed-up", "efficiency", "samples/s", "tokens/s")
    rows = []
    tokens = any(row.tokens_per_s for row in s.rows)
    for row in s.rows:
        if row.step_s is None:
            rows.append((row.label, f"✗ {row.failed or 'no numbers'}", "", "", "", "", ""))
            continue
        low, high = row.step_s_low or row.step_s, row.step_s_high or row.step_s
        rows.append(
            (
                row.label,
                duration(row.step_s),
                f"{duration(low)} to {duration(high)}" if row.repeats > 1 else "–",
                _times(row.speedup),
                percent(row.efficiency) if row.efficiency is not None else "–",
                number(row.samples_per_s, 3),
                number(row.tokens_per_s, 3) if row.tokens_per_s else "–",
            )
        )
    columns = 7 if tokens else 6 if s.timed else 5
    note = "The same batch on every row." if s.kind == "strong" else "The batch grows with the ranks."
    if any(row.fits for row in s.rows):
        note = "Each step is a pass over all documents."
    return Table(
        "scaling",
        f"Scaling{name}",
        head[:columns],
        tuple(row[:columns] for row in rows),
        _chosen(s.rows),
        note=note if s.timed else "",
    )


def _parts(s: Series, name: str) -> Table:
    rows = []
    done = [row for row in s.rows if row.step_s]
    for row in done:
        slow = row.slowest_rank
        ratio = row.compute_over_comm
        cells = [
            row.label,
            duration(row.compute_s or 0),
            duration(row.comm_s or 0) if row.comm_s else "–",
            duration(row.exposed_s or 0) if row.exposed_s else "–",
            duration(row.data_s or 0),
            number(ratio, 3) if ratio is not None else "–",
            f"rank {slow[0]}, ×{number(slow[1], 3)}" if slow else "–",
        ]
        rows.append(tuple(cells))
    head = ("", "compute", "in flight", "exposed", "input", "R", "slowest rank")
    note = "R is compute over communication in flight; exposed is the part of it that nothing hides."
    return Table("times", f"The four times{name}", head, tuple(rows), _chosen(done), note=note)


def _devices(s: Series, name: str) -> Table:
    done = [row for row in s.rows if row.device]
    rows = tuple((row.label, *devices.cells(row, "–")) for row in done)
    note = "MFU is the share of the device's peak that the arithmetic of the model reaches, attention counted in full; "
    note += "busy is the share of the time in which any kernel runs."
    return Table("devices", f"Devices{name}", ("", *devices.HEAD), rows, _chosen(done), left=2, note=note)


def _plan(s: Series, name: str) -> Table:
    by_label = {row.label: row for row in s.rows}
    rows = []
    for plan in s.planned:
        row = by_label[plan.label]
        rows.append(
            (
                row.label,
                f"{duration(row.step_s or 0)} / {duration(plan.step_s)}",
                f"{100 * plan.residual:+.0f} %",
                f"{duration(row.compute_s or 0)} / {duration(plan.compute_s)}",
                f"{duration(row.exposed_s or 0)} / {duration(plan.exposed_s)}",
                f"{_times(row.speedup)} / {_times(plan.speedup)}",
                f"{size(max(row.peak_bytes_per_rank, default=0))} / {size(plan.memory_bytes)}",
            )
        )
    head = ("measured / planned", "step", "off by", "compute", "exposed", "speed-up", "memory")
    note = "; ".join(f"{plan.label}: {plan.off}" for plan in s.planned if plan.off)
    if not s.planned[0].calibrated:
        note = "Planned by rules of thumb, without a calibration of this machine. " + note
    return Table("plan", f"Measured against planned{name}", head, tuple(rows), note=note)


def _benefit(s: Series, name: str) -> Table:
    done = [row for row in s.rows if row.step_s]
    priced = s.usd_per_device_hour is not None
    rows = []
    for row in done:
        cells = [
            row.label,
            duration(row.hours * 3600) if row.hours is not None else "–",
            number(row.device_hours, 3) if row.device_hours is not None else "–",
        ]
        if priced:
            cells += [_usd(row.cost_usd), _usd(row.usd_per_million_samples)][: 2 if s.timed else 1]
        rows.append(tuple(cells))
    head = ("", "time", "device-hours", *(["USD", "USD per million samples"][: 2 if s.timed else 1] if priced else []))
    note = f"For the whole run of {s.total_samples:,} samples" if s.timed and s.total_samples else "For one run"
    note += f", at {s.usd_per_device_hour:g} USD per device and hour." if priced else "."
    return Table("benefit", f"Cost and benefit{name}", head, tuple(rows), _chosen(done), note=note)


def _fits(s: Series, name: str) -> Table:
    most = max(row.ranks for row in s.rows if row.speedup is not None)
    rows = []
    for fit in s.fits:
        values = ", ".join(f"{key} {number(value, 3)}" for key, value in fit.parameters.items())
        cells = [NAMES[fit.law], values, percent(fit.error)]
        for wanted in (2 * most, 4 * most):
            point = next(p for p in fit.curve if p[0] >= wanted)
            cells.append(f"{_times(point[1])} ({number(point[2], 3)} to {number(point[3], 3)})")
        cells.append(_times(fit.ceiling) if fit.ceiling else "none")
        rows.append(tuple(cells))
    head = ("law", "parameters", "off by", f"on {2 * most}", f"on {4 * most}", "ceiling")
    return Table("fits", f"Beyond what was measured{name}", head, tuple(rows), left=2)


def _runs(contents: Contents) -> Table:
    rows = []
    for run in contents.runs:
        s = run.summary
        metrics = ", ".join(f"{k} {number(v)}" for k, v in (s.get("metrics") or {}).items())
        rows.append(
            (
                run.name,
                run.status,
                str(run.ranks),
                f"{len(run.points):,}",
                number(run.points[0].loss),
                number(s.get("loss_last") if s else run.points[-1].loss),
                metrics or "–",
            )
        )
    head = ("run", "status", "ranks", "steps", "first loss", "last loss", "evaluation")
    return Table("runs", "Runs", head, tuple(rows), left=2)


def _links(b: Between, name: str) -> Table:
    rows = [
        (
            link.collective.replace("_", "-"),
            link.between,
            str(link.ranks),
            duration(link.latency_s),
            f"{number(link.bandwidth_bits_s / 1e9, 3)} Gbit/s",
            size(link.sizes_bytes[-1]),
        )
        for link in b.links
    ]
    head = ("collective", "between", "ranks", "latency", "bandwidth", "up to")
    note = "Bandwidth is the slope between the largest sizes, as bits through one link."
    return Table("links", f"Links{name}", head, tuple(rows), left=2, note=note)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{number(value, 3)}×"


def _usd(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if value >= 1 else number(value, 3)
