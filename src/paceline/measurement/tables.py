"""Build the tables of a measurement: the same in the terminal, on the page of a report, in Markdown and in LaTeX."""

from collections.abc import Callable, Sequence
from typing import Any

from paceline.io.format import duration, number, percent, size
from paceline.io.table import UNKNOWN, Table
from paceline.measurement.links import Link
from paceline.measurement.result import Conclusions
from paceline.measurement.rows import (
    FEW_RETURNS,
    FailedRow,
    MeasuredRow,
    TimedRow,
    compute_marginal_speedup,
    drop_failed,
    find_reference,
    is_beyond_devices,
)

SCALING_NOTES = {
    "strong": "The same batch on every row.",
    "weak": "The batch grows with the ranks.",
    "passes": "Each step is a pass over all samples.",
    "times": "",
}


def build_measurement_tables(found: Conclusions, name: str = "") -> list[Table]:
    measured = found.measured
    tables = [build_scaling_table(found)]
    tables += [build_times_table(measured)] if found.timed else []
    tables += [build_plan_table(found)] if found.planned else []
    tables.append(build_cost_table(found))
    for table in tables:
        table.title += name
    return tables


def build_summary_table(found: Conclusions) -> Table:
    """Build the one table of the terminal: speed, where a step goes, memory and cost; columns without a value go."""
    cells = {row.label: _summarise(row) for row in found.measured}
    names = list(next(iter(cells.values()), {}))
    names = [name for name in names if any(row[name] not in (UNKNOWN, "0 %") for row in cells.values())]
    table = Table(*(names or [""]), name="summary", mark=True)
    _add_rows(table, found, lambda row: [cells[row.label][name] for name in names])
    return table


def _summarise(row: MeasuredRow) -> dict[str, str]:
    return {
        "": row.label,
        "step": duration(row.step_s),
        "±": format_known(percent, row.noise if row.repeats > 1 else None),
        "speed-up": format_speedup(row.speedup),
        "efficiency": percent(row.efficiency),
        "samples/s": number(row.samples_per_s, 3),
        **{name: percent(term_s / row.step_s) for name, term_s in row.terms.items()},
        "R": format_known(number, row.compute_over_comm, 3),
        "memory": format_known(size, row.loads.peak_bytes),
        "USD": format_known(format_usd, row.cost.cost_usd),
    }


def build_scaling_table(found: Conclusions) -> Table:
    head = ("", "step" if found.timed else "time", "spread", "speed-up", "efficiency", "samples/s", "tokens/s")
    columns = 7 if any(row.tokens_per_s for row in found.measured) else 6 if found.timed else 5
    note = SCALING_NOTES["passes" if any(row.fits for row in found.measured) else found.kind]
    table = Table(*head[:columns], name="scaling", title="Scaling", note=note, mark=True)
    _add_rows(table, found, lambda row: _format_scaling(row)[:columns])
    return table


def _add_rows(table: Table, found: Conclusions, format_row: Callable[[Any], Sequence[str]]) -> None:
    for row in found.rows:
        if isinstance(row, FailedRow):
            table.add_failed_row(row.label, row.failed or "no numbers")
        else:
            table.add_row(*format_row(row), chosen=row.recommended)


def _format_scaling(row: TimedRow) -> tuple[str, ...]:
    tokens_per_s = row.tokens_per_s if isinstance(row, MeasuredRow) else None
    return (
        row.label,
        duration(row.step_s),
        f"{duration(row.step_s_low)} to {duration(row.step_s_high)}" if row.repeats > 1 else UNKNOWN,
        format_speedup(row.speedup),
        percent(row.efficiency),
        number(row.samples_per_s, 3),
        format_known(number, tokens_per_s or None, 3),
    )


def build_times_table(rows: Sequence[MeasuredRow]) -> Table:
    device = next((row.resources.device for row in rows if row.resources.device), "")
    note = "R is compute over communication in flight; exposed is what nothing hides of it, without waiting for a rank."
    if device:
        note += (
            f" MFU is the share of the peak of {device} that the arithmetic of the model reaches, attention counted "
            "in full; busy is the share of the time in which any kernel runs."
        )
    table = Table(
        *("", "compute", "exposed", "waiting", "input", "in flight", "R", "slowest rank"),
        *(("MFU", "busy", "in use") if device else ()),
        name="times",
        title="The four times",
        note=note,
    )
    for row in rows:
        slow, usage = row.loads.slowest, row.resources.usage
        of_device = (
            format_known(lambda share: f"{number(100 * share, 3)} %", row.resources.mfu),
            format_known(percent, usage.get("device_share")),
            format_known(size, usage.get("device_bytes")),
        )
        table.add_row(
            row.label,
            *(f"{duration(s)}, {percent(s / row.step_s)}" if s else UNKNOWN for s in row.terms.values()),
            format_known(duration, row.parts.comm_s or None),
            format_known(number, row.compute_over_comm, 3),
            f"rank {slow.rank}, ×{number(slow.over_others, 3)}" if slow else UNKNOWN,
            *(of_device if device else ()),
            chosen=row.recommended,
        )
    return table


def build_plan_table(found: Conclusions) -> Table:
    note = "; ".join(f"{plan.label}: {plan.off}" for plan in found.planned if plan.off)
    if not found.planned[0].calibrated:
        note = "Planned by rules of thumb, without a calibration of this machine. " + note
    head = ("measured / planned", "step", "off by", "compute", "exposed", "speed-up", "memory")
    table = Table(*head, name="plan", title="Measured against planned", note=note)
    by_label = {row.label: row for row in found.measured}
    for plan in found.planned:
        row = by_label[plan.label]
        table.add_row(
            row.label,
            f"{duration(row.step_s)} / {duration(plan.step_s)}",
            f"{100 * plan.residual:+.0f} %",
            f"{duration(row.parts.compute_s)} / {duration(plan.compute_s)}",
            f"{duration(row.parts.exposed_s)} / {duration(plan.exposed_s)}",
            f"{format_speedup(row.speedup)} / {format_speedup(plan.speedup)}",
            f"{size(row.loads.peak_bytes or 0)} / {size(plan.memory_bytes)}",
        )
    return table


def build_cost_table(found: Conclusions) -> Table:
    timed, rows, base = found.timed, drop_failed(found.rows), find_reference(found.rows)
    usd = (1 + timed) * (found.usd_per_device_hour is not None)
    whole = f"the whole run of {found.total_samples:,} samples" if timed and found.total_samples else "one run"
    price = f", at {found.usd_per_device_hour:g} USD per device and hour" if usd else ""
    table = Table(
        *("", "time", "device-hours", "relative", "each more adds", "returns"),
        *(*["memory"] * timed, *("USD", "USD per million samples")[:usd]),
        name="benefit",
        title="Cost and benefit",
        note=f"For {whole}{price}. Each more adds: the speed-up of a further {'rank' if timed else 'device'}, "
        f"over the row before; below {FEW_RETURNS:g} returns diminish.",
    )
    for place, row in enumerate(rows):
        cost = row.cost
        hours = base.cost.device_hours if base is not None and base is not row else None
        adds = compute_marginal_speedup(row, rows[:place])
        possible = base is not None and not is_beyond_devices(row, base)
        peak = row.loads.peak_bytes if isinstance(row, MeasuredRow) else None
        table.add_row(
            row.label,
            format_known(lambda hours: duration(3600 * hours), cost.hours),
            format_known(number, cost.device_hours, 3),
            f"{100 * (cost.device_hours / hours - 1):+.0f} %" if cost.device_hours and hours else UNKNOWN,
            format_known(number, adds, 2),
            format_known(_describe_returns, adds if possible else None),
            *[format_known(size, peak)] * timed,
            *(format_known(format_usd, amount) for amount in (cost.cost_usd, cost.usd_per_million_samples)[:usd]),
            chosen=row.recommended,
        )
    return table


def _describe_returns(adds: float) -> str:
    return "none" if adds <= 0 else "diminish" if adds < FEW_RETURNS else "good"


def build_links_table(links: Sequence[Link]) -> Table:
    sizes = sorted({s for link in links for s in link.sizes_bytes})[1:]
    note = "Bandwidth is the slope between the largest sizes, as bits through one link."
    head = ("", "latency", *map(size, sizes), "bandwidth")
    table = Table(*head, name="links", title="Links", note=note)
    for link in links:
        took = dict(zip(link.sizes_bytes, link.seconds, strict=True))
        between = "" if link.of_all_ranks else f", {link.between}"
        times = (link.latency_s, *map(took.get, sizes))
        table.add_row(
            f"{link.name}, {link.ranks} ranks{between}", *(format_known(duration, s) for s in times), link.rate
        )
    return table


def format_speedup(value: float | None) -> str:
    return format_known(lambda value: f"{number(value, 3)}×", value)


def format_usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else number(value, 3)


def format_known(render: Callable[..., str], value: float | None, *options: int) -> str:
    """Return a value as text, or the cell of one that is not known."""
    return UNKNOWN if value is None else render(value, *options)
