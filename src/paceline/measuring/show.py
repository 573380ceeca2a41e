"""A measurement on a terminal, in at most 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.measuring.devices import HEAD, cells
from paceline.measuring.diagnose import NAMES
from paceline.measuring.links import Link
from paceline.measuring.result import Measurement
from paceline.measuring.rows import Row
from paceline.measuring.scaling import Fit
from paceline.record.units import duration, number, percent, size

TEXT_COLUMNS = 98
LABEL_COLUMNS = 24


def show(found: Measurement) -> Iterator[Any]:
    """What to print, part by part, for rich."""
    batch = "the batch grows with the ranks" if found.weak else "the same batch on all rows"
    if any(row.fits for row in found.rows):
        batch = "each step a pass over all documents"
    repeats = max((row.repeats for row in found.rows), default=0)
    yield f"{found.name}: {found.kind} scaling, {batch}; {found.steps} steps, {repeats} repeats, medians"
    yield ""
    yield _times(found.rows)
    yield from _failed(found.rows)
    yield ""
    yield _benefit(found)
    if any(row.device for row in found.rows):
        yield ""
        yield _devices(found.rows)
    if found.planned:
        yield ""
        yield from _beside_plan(found)
    yield ""
    for fit in found.fits:
        yield from wrapped(say_fit(fit, max(row.ranks for row in found.rows)), "")
    for finding in found.findings:
        yield from wrapped(finding.text + (f". To change it: {finding.advice}" if finding.advice else ""), "→ ")
    yield ""
    for note in found.notes:
        yield from wrapped(note, "! ")
    for line in found.verdict:
        yield from wrapped(line, "")


def wrapped(text: str, mark: str) -> Iterator[str]:
    """A sentence in lines of the table's width; a number and its unit stay together."""
    kept = re.sub(r"(?<=\d) (?=[%a-zA-Z]{1,3}\b|%)", "\u00a0", text)
    for place, line in enumerate(textwrap.wrap(kept, TEXT_COLUMNS - len(mark), break_on_hyphens=False)):
        yield (mark if place == 0 else " " * len(mark)) + line.replace("\u00a0", " ")


def table(*columns: str, left: int = 1) -> Any:
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        out.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    return out


def _times(rows: Sequence[Row]) -> Any:
    out = table("", "step", "spread", "compute", "exposed", "waiting", "input", "in flight", "R", "samples/s", left=1)
    for row in rows:
        if row.step_s is None:
            continue
        spread = ((row.step_s_high or 0) - (row.step_s_low or 0)) / 2 / row.step_s
        ratio = row.compute_over_comm
        out.add_row(
            cut(row.label),
            ms(row.step_s),
            f"±{percent(spread)}" if row.repeats > 1 else "-",
            *(percent(part / row.step_s) for part in _parts(row)),
            ms(row.comm_s) if row.comm_s else "-",
            number(ratio, 3) if ratio is not None else "-",
            number(row.samples_per_s, 3),
        )
    return out


def _parts(row: Row) -> tuple[float, ...]:
    waiting = row.waiting_s or 0.0
    return (row.compute_s or 0.0, max(0.0, (row.exposed_s or 0.0) - waiting), waiting, row.data_s or 0.0)


def _failed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.failed:
            yield from wrapped(f"{row.label}: {row.failed}", "✗ ")


def _benefit(found: Measurement) -> Any:
    priced = found.usd_per_device_hour is not None
    columns = ["", "", "speed-up", "eff.", "hours", "device-h", "memory", "slowest rank"]
    out = table(*columns, *(["USD", "USD/M samples"] if priced else []), left=2)
    for row in found.rows:
        if row.step_s is None:
            continue
        slow = row.slowest_rank
        cells = [
            "✓" if row.recommended else " ",
            cut(row.label),
            f"{number(row.speedup, 3)}×" if row.speedup is not None else "-",
            percent(row.efficiency) if row.efficiency is not None else "-",
            amount(row.hours),
            amount(row.device_hours),
            size(max(row.peak_bytes_per_rank)) if row.peak_bytes_per_rank else "-",
            f"{slow[0]} (×{number(slow[1], 3)})" if slow else "-",
        ]
        if priced:
            cells += [amount(row.cost_usd), amount(row.usd_per_million_samples)]
        out.add_row(*cells)
    return out


def _devices(rows: Sequence[Row]) -> Any:
    out = table("", *HEAD, left=2)
    for row in rows:
        if row.device:
            out.add_row(cut(row.label), *cells(row, "-"))
    return out


def _beside_plan(found: Measurement) -> Iterator[Any]:
    calibrated = "" if found.planned[0].calibrated else ", by rules of thumb: there is no calibration"
    yield f"measured against planned{calibrated}"
    out = table("", "step", "planned", "off by", "compute", "planned", "exposed", "planned", "speed-up", "planned")
    rows = {row.label: row for row in found.rows}
    for plan in found.planned:
        row = rows[plan.label]
        out.add_row(
            cut(row.label),
            ms(row.step_s),
            ms(plan.step_s),
            f"{100 * plan.residual:+.0f} %",
            ms(row.compute_s),
            ms(plan.compute_s),
            ms(row.exposed_s),
            ms(plan.exposed_s),
            f"{number(row.speedup, 3)}×" if row.speedup is not None else "-",
            f"{number(plan.speedup, 3)}×" if plan.speedup is not None else "-",
        )
    yield out
    for plan in found.planned:
        if plan.off:
            yield from wrapped(f"{plan.label}: {plan.off}", "  ")
    if any(plan.off for plan in found.planned):
        again = f"paceline calibrate --from {found.folder}" if found.planned[0].calibrated else "paceline calibrate"
        yield f"  to plan by this machine:  {again}"


def say_fit(fit: Fit, most: int) -> str:
    names = {"serial": "serial share", "contention": "contention", "crosstalk": "cross-talk"}
    values = ", ".join(f"{names[name]} {number(value, 3)}" for name, value in fit.parameters.items())
    further = [point for point in fit.curve if point[0] in (2 * most, 4 * most)]
    told = ", ".join(f"{n}: {number(s, 3)}× ({number(low, 3)} to {number(high, 3)})" for n, s, low, high in further)
    ends = ""
    if fit.peak_ranks and fit.ceiling:
        ends = f"; best at {number(round(fit.peak_ranks))} ranks with {number(fit.ceiling, 3)}×"
    elif fit.ceiling:
        ends = f"; never more than {number(fit.ceiling, 3)}×"
    return f"{NAMES[fit.law]}: {values}, off by {percent(fit.error)} at most; on {told}{ends}"


def links_table(links: Sequence[Link]) -> Any:
    """Times by size; that of the smallest is the latency."""
    sizes = sorted({s for link in links for s in link.sizes_bytes})[1:]
    out = table("", "latency", *(size(s) for s in sizes), "bandwidth", left=1)
    for link in links:
        took = dict(zip(link.sizes_bytes, link.seconds, strict=True))
        where = "" if link.between == "all ranks" else f", {link.between}"
        out.add_row(
            f"{link.collective.replace('_', '-')}, {link.ranks} ranks{where}",
            _short(link.latency_s),
            *(_short(took[s]) if s in took else "-" for s in sizes),
            f"{number(link.bandwidth_bits_s / 1e9, 3)} Gbit/s",
        )
    return out


def cut(label: str) -> str:
    return label if len(label) <= LABEL_COLUMNS else label[: LABEL_COLUMNS - 1] + "…"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _short(seconds: float) -> str:
    return f"{number(seconds * 1e6, 3)} µs" if seconds < 1e-3 else duration(seconds)


def amount(value: float | None) -> str:
    return "-" if value is None else number(value, 3)
