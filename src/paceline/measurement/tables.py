"""Build the tables of a measurement: the same in the terminal, on the page of a report, in Markdown and in LaTeX."""

from collections.abc import Callable, Sequence

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
    has_passes,
    is_beyond_devices,
)

SCALING_NOTES = {
    "strong": "The same batch on every row.",
    "weak": "The batch grows with the ranks.",
    "passes": "Each step is a pass over all samples.",
    "times": "",
}


def build_measurement_tables(found: Conclusions, name: str = "") -> list[Table]:
    tables = [build_scaling_table(found)]
    if found.timed:
        tables.append(build_times_table(found.measured))
    if any(row.resources.device for row in found.measured):
        tables.append(build_devices_table(found.measured))
    if found.planned:
        tables.append(build_plan_table(found))
    tables.append(build_cost_table(found))
    for table in tables:
        table.title += name
    return tables


def build_summary_table(found: Conclusions) -> Table:
    """Build the one table of the terminal: speed, where a step goes, memory and cost; columns without a value go."""
    rows = []
    for row in found.measured:
        parts = row.parts
        seconds = (parts.compute_s, parts.travelling_s, parts.waiting_s, parts.data_s)
        shares = zip(("compute", "exposed", "waiting", "input"), seconds, strict=True)
        rows.append(
            {
                "": row.label,
                "step": duration(row.step_s),
                "±": _show(percent, row.noise if row.repeats > 1 else None),
                "speed-up": format_speedup(row.speedup),
                "efficiency": percent(row.efficiency),
                "samples/s": number(row.samples_per_s, 3),
                **{name: percent(s / row.step_s) for name, s in shares},
                "R": _show(number, row.compute_over_comm, 3),
                "memory": _show(size, max(row.loads.peak_bytes_per_rank, default=None)),
                "USD": _show(format_usd, row.cost.cost_usd),
            }
        )
    names = [name for name in (rows[0] if rows else ()) if any(row[name] not in (UNKNOWN, "0 %") for row in rows)]
    table = Table(*(names or [""]), name="summary", mark=True)
    cells = {values[""]: [values[name] for name in names] for values in rows}
    for each in found.rows:
        if isinstance(each, FailedRow):
            table.add_failed_row(each.label, each.failed or "no numbers")
        else:
            table.add_row(*cells[each.label], chosen=each.recommended)
    return table


def build_scaling_table(found: Conclusions) -> Table:
    head = ("", "step" if found.timed else "time", "spread", "speed-up", "efficiency", "samples/s", "tokens/s")
    columns = 7 if any(row.tokens_per_s for row in found.measured) else 6 if found.timed else 5
    note = SCALING_NOTES["passes" if has_passes(found.rows) else found.kind]
    table = Table(*head[:columns], name="scaling", title="Scaling", note=note, mark=True)
    for row in found.rows:
        if isinstance(row, FailedRow):
            table.add_failed_row(row.label, row.failed or "no numbers")
        else:
            table.add_row(*_format_scaling(row)[:columns], chosen=row.recommended)
    return table


def _format_scaling(row: TimedRow) -> tuple[str, ...]:
    tokens_per_s = row.tokens_per_s if isinstance(row, MeasuredRow) else None
    return (
        row.label,
        duration(row.step_s),
        f"{duration(row.step_s_low)} to {duration(row.step_s_high)}" if row.repeats > 1 else UNKNOWN,
        format_speedup(row.speedup),
        percent(row.efficiency),
        number(row.samples_per_s, 3),
        _show(number, tokens_per_s or None, 3),
    )


def build_times_table(rows: Sequence[MeasuredRow]) -> Table:
    table = Table(
        *("", "compute", "exposed", "waiting", "input", "in flight", "R", "slowest rank"),
        name="times",
        title="The four times",
        note="R is compute over communication in flight; exposed is the part of it that nothing hides, without "
        "waiting for a slower rank.",
    )
    for row in rows:
        parts, slow, ratio = row.parts, row.loads.slowest, row.compute_over_comm
        shares = (parts.compute_s, parts.travelling_s, parts.waiting_s, parts.data_s)
        table.add_row(
            row.label,
            *(f"{duration(s)}, {percent(s / row.step_s)}" if s else UNKNOWN for s in shares),
            _show(duration, parts.comm_s or None),
            _show(number, ratio, 3),
            f"rank {slow.rank}, ×{number(slow.over_others, 3)}" if slow else UNKNOWN,
            chosen=row.recommended,
        )
    return table


def build_devices_table(rows: Sequence[MeasuredRow]) -> Table:
    table = Table(
        *("", "device", "MFU", "busy", "in use"),
        left=2,
        name="devices",
        title="Devices",
        note="MFU is the share of the device's peak that the arithmetic of the model reaches, attention counted in "
        "full; busy is the share of the time in which any kernel runs.",
    )
    for row in rows:
        used = row.resources
        if used.device:
            mfu = _show(lambda share: f"{number(100 * share, 3)} %", used.mfu)
            busy, in_use = _show(percent, used.usage.get("device_share")), _show(size, used.usage.get("device_bytes"))
            table.add_row(row.label, used.device, mfu, busy, in_use, chosen=row.recommended)
    return table


def build_plan_table(found: Conclusions) -> Table:
    note = "; ".join(f"{plan.label}: {plan.off}" for plan in found.planned if plan.off)
    if not found.planned[0].calibrated:
        note = "Planned by rules of thumb, without a calibration of this machine. " + note
    table = Table(
        *("measured / planned", "step", "off by", "compute", "exposed", "speed-up", "memory"),
        name="plan",
        title="Measured against planned",
        note=note,
    )
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
            f"{size(max(row.loads.peak_bytes_per_rank, default=0))} / {size(plan.memory_bytes)}",
        )
    return table


def build_cost_table(found: Conclusions) -> Table:
    usd = (2 if found.timed else 1) if found.usd_per_device_hour is not None else 0
    whole = f"the whole run of {found.total_samples:,} samples" if found.timed and found.total_samples else "one run"
    price = f", at {found.usd_per_device_hour:g} USD per device and hour" if usd else ""
    rows, base = drop_failed(found.rows), find_reference(found.rows)
    table = Table(
        *("", "time", "device-hours", "relative", "each more adds"),
        *("returns", *["memory"] * found.timed, *("USD", "USD per million samples")[:usd]),
        name="benefit",
        title="Cost and benefit",
        note=f"For {whole}{price}. Each more adds: the speed-up of a further {'rank' if found.timed else 'device'}, "
        f"over the row before; below {FEW_RETURNS:g} returns diminish.",
    )
    for place, row in enumerate(rows):
        cost = row.cost
        hours = (base.cost.device_hours if base else None) or 0.0
        relative = cost.device_hours / hours - 1 if cost.device_hours and hours and row is not base else None
        adds = compute_marginal_speedup(row, rows[:place])
        returns = None if base is None or is_beyond_devices(row, base) else adds
        peaks = row.loads.peak_bytes_per_rank if isinstance(row, MeasuredRow) else ()
        table.add_row(
            row.label,
            _show(lambda hours: duration(3600 * hours), cost.hours),
            _show(number, cost.device_hours, 3),
            _show(lambda share: f"{100 * share:+.0f} %", relative),
            _show(number, adds, 2),
            _show(lambda adds: "none" if adds <= 0 else "diminish" if adds < FEW_RETURNS else "good", returns),
            *[_show(size, max(peaks, default=None))] * found.timed,
            *(_show(format_usd, amount) for amount in (cost.cost_usd, cost.usd_per_million_samples)[:usd]),
            chosen=row.recommended,
        )
    return table


def build_links_table(links: Sequence[Link], name: str = "") -> Table:
    sizes = sorted({s for link in links for s in link.sizes_bytes})[1:]
    note = "Bandwidth is the slope between the largest sizes, as bits through one link."
    head = ("", "latency", *(size(s) for s in sizes), "bandwidth")
    table = Table(*head, name="links", title=f"Links{name}", note=note)
    for link in links:
        took = dict(zip(link.sizes_bytes, link.seconds, strict=True))
        between = "" if link.of_all_ranks else f", {link.between}"
        times = (link.latency_s, *(took.get(s) for s in sizes))
        table.add_row(f"{link.name}, {link.ranks} ranks{between}", *(_show(duration, s) for s in times), link.rate)
    return table


def format_speedup(value: float | None) -> str:
    return _show(lambda value: f"{number(value, 3)}×", value)


def format_usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else number(value, 3)


def _show(render: Callable[..., str], value: float | None, *options: int) -> str:
    """Return a value as text, or the cell of one that is not known."""
    return UNKNOWN if value is None else render(value, *options)
