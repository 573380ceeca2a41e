"""A measurement on a terminal, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.measuring.devices import HEAD, cells
from paceline.measuring.links import Link
from paceline.measuring.result import Measurement
from paceline.measuring.rows import FailedRow, MeasuredRow, are_passes, done
from paceline.measuring.words import law_text
from paceline.record.units import duration, number, percent, size, wrapped

LABEL_COLUMNS = 24


def show(found: Measurement) -> Iterator[Any]:
    """What to print, part by part, for rich."""
    measured = done(found.rows)
    batch = "the batch grows with the ranks" if found.weak else "the same batch on all rows"
    if are_passes(measured):
        batch = "each step a pass over all documents"
    repeats = max((row.repeats for row in measured), default=0)
    yield f"{found.name}: {found.kind} scaling, {batch}; {found.steps} steps, {repeats} repeats, medians"
    yield ""
    yield _times(measured)
    for failed in (row for row in found.rows if isinstance(row, FailedRow)):
        yield from wrapped(f"{failed.label}: {failed.failed}", "✗ ")
    yield ""
    yield _benefit(measured, found.usd_per_device_hour is not None)
    if any(row.resources.device for row in measured):
        yield ""
        yield devices_table(measured)
    if found.planned:
        yield ""
        yield from _beside_plan(found)
    yield ""
    for law in found.laws:
        yield from wrapped(law_text(law, max(row.ranks for row in found.rows)), "")
    for finding in found.findings:
        yield from wrapped(finding.text + (f". To change it: {finding.advice}" if finding.advice else ""), "→ ")
    yield ""
    for note in found.notes:
        yield from wrapped(note, "! ")
    for line in found.verdict:
        yield from wrapped(line, "")


def table(*columns: str, left: int = 1) -> Any:
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        out.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    return out


def _times(rows: Sequence[MeasuredRow]) -> Any:
    out = table("", "step", "spread", "compute", "exposed", "waiting", "input", "in flight", "R", "samples/s", left=1)
    for row in rows:
        spread = (row.step_s_high - row.step_s_low) / 2 / row.step_s
        parts, ratio = row.parts, row.compute_over_comm
        out.add_row(
            cut(row.label),
            duration(row.step_s),
            f"±{percent(spread)}" if row.repeats > 1 else "-",
            *(percent(s / row.step_s) for s in (parts.compute_s, parts.travelling_s, parts.waiting_s, parts.data_s)),
            duration(parts.comm_s) if parts.comm_s else "-",
            number(ratio, 3) if ratio is not None else "-",
            number(row.samples_per_s, 3),
        )
    return out


def _benefit(rows: Sequence[MeasuredRow], priced: bool) -> Any:
    columns = ["", "", "speed-up", "eff.", "hours", "device-h", "memory", "slowest rank"]
    out = table(*columns, *(["USD", "USD/M samples"] if priced else []), left=2)
    for row in rows:
        slow, peaks = row.loads.slowest, row.loads.peak_bytes_per_rank
        cells = [
            "✓" if row.recommended else " ",
            cut(row.label),
            f"{number(row.speedup, 3)}×",
            percent(row.efficiency),
            amount(row.cost.hours),
            amount(row.cost.device_hours),
            size(max(peaks)) if peaks else "-",
            f"{slow.rank} (×{number(slow.over_others, 3)})" if slow else "-",
        ]
        if priced:
            cells += [amount(row.cost.cost_usd), amount(row.cost.usd_per_million_samples)]
        out.add_row(*cells)
    return out


def devices_table(rows: Sequence[MeasuredRow]) -> Any:
    out = table("", *HEAD, left=2)
    for row in rows:
        if row.resources.device:
            out.add_row(cut(row.label), *cells(row.resources, "-"))
    return out


def _beside_plan(found: Measurement) -> Iterator[Any]:
    calibrated = "" if found.planned[0].calibrated else ", by rules of thumb: there is no calibration"
    yield f"measured against planned{calibrated}"
    out = table("", "step", "planned", "off by", "compute", "planned", "exposed", "planned", "speed-up", "planned")
    rows = {row.label: row for row in done(found.rows)}
    for plan in found.planned:
        row = rows[plan.label]
        out.add_row(
            cut(row.label),
            duration(row.step_s),
            duration(plan.step_s),
            f"{100 * plan.residual:+.0f} %",
            duration(row.parts.compute_s),
            duration(plan.compute_s),
            duration(row.parts.exposed_s),
            duration(plan.exposed_s),
            f"{number(row.speedup, 3)}×",
            f"{number(plan.speedup, 3)}×" if plan.speedup is not None else "-",
        )
    yield out
    for plan in found.planned:
        if plan.off:
            yield from wrapped(f"{plan.label}: {plan.off}", "  ")
    if any(plan.off for plan in found.planned):
        again = f"paceline calibrate --from {found.folder}" if found.planned[0].calibrated else "paceline calibrate"
        yield f"  to plan by this machine:  {again}"


def links_table(links: Sequence[Link]) -> Any:
    """Times by size; that of the smallest is the latency."""
    sizes = sorted({s for link in links for s in link.sizes_bytes})[1:]
    out = table("", "latency", *(size(s) for s in sizes), "bandwidth", left=1)
    for link in links:
        took = dict(zip(link.sizes_bytes, link.seconds, strict=True))
        where = "" if link.of_all_ranks else f", {link.between}"
        out.add_row(
            f"{link.name}, {link.ranks} ranks{where}",
            _short(link.latency_s),
            *(_short(took[s]) if s in took else "-" for s in sizes),
            link.rate,
        )
    return out


def cut(label: str) -> str:
    return label if len(label) <= LABEL_COLUMNS else label[: LABEL_COLUMNS - 1] + "…"


def _short(seconds: float) -> str:
    return f"{number(seconds * 1e6, 3)} µs" if seconds < 1e-3 else duration(seconds)


def amount(value: float | None) -> str:
    return "-" if value is None else number(value, 3)
