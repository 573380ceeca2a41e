"""Render a plan for the terminal, in at most 100 columns: the answer, one table and, on request, every term."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from paceline.hardware.catalogue import HOST
from paceline.hardware.failures import describe_interval
from paceline.io.format import format_short_duration, number, percent, size, wrap_lines
from paceline.io.table import Column, Table
from paceline.planner.advice import describe_base
from paceline.planner.candidates import PricedLayout, RejectedFamily, format_words
from paceline.planner.cost_model import PlanWording
from paceline.planner.formulas.simulation import Timeline
from paceline.planner.plan import Plan
from paceline.planner.rows import WORLD_G_PER_KWH, WORLD_SOURCE, PlanRow
from paceline.planner.search import SearchResult

MAX_CANDIDATES = 6
MAX_REJECTED = 4
MAX_MISFITS = 2  # numbers of devices on which nothing fits, without `verbose`: those of the most devices
NOTABLE_FAILURES = 0.5  # of the whole run, that are mentioned without `verbose`
WIDE_NAME = 20  # characters of a layout's name that leave room for all columns


def format_multiple(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×" if ratio < 99.95 else f"{ratio:,.0f}×"


def format_cell_amount(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.095 else f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"


def format_run_time(hours: float | None) -> str:
    """Format the length of a run as people say it: 12.3 s, 23.9 min, 31 h, 4.2 days; "-" if it is not known."""
    if hours is None:
        return "-"
    if hours >= 36:
        return f"{number(hours / 24, 3)} days"
    return format_short_duration(3600 * hours)


def render_plan(plan: Plan, verbose: bool = False) -> Iterator[Any]:
    """Yield the answer and the table of devices; with `verbose` also layouts, limits and every term."""
    yield from wrap_lines(summarize_plan(plan), "")
    decides = plan.links is not None and (verbose or plan.links.break_even_bytes_s is not None)
    for line in (*plan.advice, *([plan.links.describe()] if plan.links and decides else ())):
        yield from wrap_lines(line, "→ ")
    yield from (line for text in _describe_failures(plan, verbose) for line in wrap_lines(text, "→ "))
    if plan.chosen is not None:
        yield from wrap_lines(format_words(plan.overrides()), "  ")
    yield ""
    if plan.rows:
        yield _build_device_table(plan)
    reasons = list(_list_impossible(plan))
    for line in reasons if verbose else reasons[-MAX_MISFITS:]:
        yield from wrap_lines(line, "✗  ")
    for line in (*_list_conditions(plan), *(_list_remarks(plan) if verbose else ())):
        yield from wrap_lines(line, "")
    if not verbose:
        yield "more with -v: layouts, limits, terms of time and memory; all of it with --json"
        return
    chosen, wording = plan.chosen, plan.cost_model.wording
    if wording.several_layouts:
        for found in (chosen.found,) if chosen else plan.misfits[-1:]:
            yield ""
            if found.prices:
                yield _build_layout_table(found, chosen.price if chosen else None)
            yield from _list_rejected(found)
            yield from wrap_lines(found.explain_choice(), "  ")
    if chosen is not None:
        yield ""
        yield _build_term_table(chosen.price, wording, plan.timeline)


def summarize_plan(plan: Plan) -> str:
    """Return one line: whether the run fits, where, how long it takes and what it costs."""
    row, device, name = plan.chosen, plan.target.whole.device.name, plan.cost_model.name
    if row is None:
        short = any(rejected.over_bytes for found in plan.misfits for rejected in found.rejected)
        return f"{name} {'does not fit' if short else 'is not possible'} on {plan.target.name}."
    where = f"{row.devices:,} rank{'s' * (row.devices > 1)}" if plan.target.shared else f"{row.devices:,} × {device}"
    offload = " only with CPU offload" * row.price.layout.offload
    verb = "may not fit" if row.price.tight else "fits"
    amounts = []
    if row.hours is not None and row.hours_band is not None:
        low, high = map(format_run_time, row.hours_band)
        unit = high.partition(" ")[2]
        amounts = [f"{format_run_time(row.hours)} ({low.removesuffix(f' {unit}')} to {high})"]
    if row.cost_usd is not None:
        amounts.append(f"{format_cell_amount(row.cost_usd)} USD{' (spot)' * plan.rates.take_spot}")
    elif row.spot_usd is not None:
        amounts.append(f"{format_cell_amount(row.spot_usd)} USD (spot)")
    total = f": {', '.join(amounts)}" if amounts else f": {format_short_duration(row.price.step_s)} per step"
    return " ".join(filter(None, (f"{name} {verb}{offload} on {where}{total}.", _describe_requirements(plan))))


def _describe_failures(plan: Plan, verbose: bool) -> Iterator[str]:
    """Yield what failures are expected to cost, where there are any, and how often to save a checkpoint."""
    row = plan.chosen
    if row is None or (found := plan.expect(row)) is None or (found.failures < NOTABLE_FAILURES and not verbose):
        return
    model, save_s = plan.failures, plan.cost_model.save_s(row.price) or 0.0
    low, high = (format_run_time(hours) for hours in found.hours_band)
    count = f"{number(found.failures, 2)} failure{'s' * (found.failures != 1)}"
    expected = f"{format_run_time(found.hours)} ({low} to {high}) with {count} expected, goodput"
    yield f"{expected} {percent(found.goodput)}: one device fails each {number(model.mtbf_h)} h ({model.source})."
    steps = max(1, round(found.best_interval_s / row.price.step_s))
    best = describe_interval(steps, save_s, model.mtbf_h, row.devices, row.price.step_s)
    yield f"train.checkpoint_every={steps}: {best}."


def _describe_requirements(plan: Plan) -> str:
    asked = []
    if (deadline := plan.requirements.deadline_h) is not None:
        asked.append(f"a deadline of {deadline:,.6g} h")
    if plan.requirements.budget_usd is not None:
        asked.append(f"a budget of {plan.requirements.budget_usd:,.10g} USD")
    if plan.requirements.min_efficiency is not None:
        asked.append(f"an efficiency of at least {percent(plan.requirements.min_efficiency)}")
    if not asked:
        return ""
    limits = " and ".join(asked)
    if not plan.ranking.accepted:
        return f"No row meets {limits}; ✓ comes nearest."
    return f"✓ is the {'fastest' if deadline is None else 'cheapest'} that meets {limits}."


def _list_conditions(plan: Plan) -> Iterator[str]:
    """List what the answer rests on: model, cluster, prices, and what was assumed or is not checked."""
    target, rates, cluster = plan.target, plan.rates, plan.target.whole
    yield plan.cost_model.headline()
    links = f"{size(cluster.link_bytes_s)}/s in a node" if cluster.per_node > 1 and cluster.link_bytes_s > 1 else ""
    network = f"{number(cluster.node_bytes_s * 8 / 1e9, 3)} Gbit/s per node" if cluster.nodes > 1 else ""
    price = ""
    if rates.usd is not None:
        price = f"{rates.usd:g} USD per {'machine' if target.shared else 'device'} and hour"
    if rates.take_spot:
        price += " as spot"
    elif rates.spot_usd is not None:
        price += f" ({rates.spot_usd:g} as spot)" if price else f"{rates.spot_usd:g} USD spot"
    shape = f"{f'{cluster.nodes} × ' * (cluster.nodes > 1)}{cluster.per_node} × {cluster.device.name}"
    if target.shared:
        shape = f"this machine, {cluster.device.name} shared by up to {cluster.devices} ranks"
    yield ", ".join(filter(None, (f"{target.name} = {shape}", links, network, price)))
    if calibration := target.calibration:
        yield f"calibrated on {calibration.host}, {calibration.date}: {calibration.file}"
        if calibration.correction is not None:
            yield calibration.correction.describe()
    elif target.shared:
        yield "not calibrated, rates by rule of thumb; measure this machine with  paceline calibrate"
    if target.note:
        yield target.note
    if fixed := plan.cost_model.constraints.describe():
        yield f"Fixed by the run file: {fixed}"
    yield from (f"assumed: {text}" for text in plan.cost_model.assumptions)
    if offloaded := [row.price for row in plan.rows if row.price.layout.offload]:
        unchecked = f" (not checked: set {HOST} in the cluster file)" * (cluster.host_bytes is None)
        yield f"* states in host memory: needs {size(max(p.host_node_bytes for p in offloaded))} per node{unchecked}"


def _build_device_table(plan: Plan) -> Table:
    wording, name = plan.cost_model.wording, plan.cost_model.layout_name
    amounts = [_format_amounts(plan, row) for row in plan.rows]
    shown = list_known(amounts)
    if max(len(name(row.price)) for row in plan.rows) > WIDE_NAME:
        shown = [column for column in shown if column not in ("kWh", "spot USD")]
    columns = ("devices", wording.layout, wording.step, "speed-up", "eff.", *shown)
    table = Table(*columns, Column("verdict", "left"), left=2, mark=True)
    for row, cells in zip(plan.rows, amounts, strict=True):
        table.add_row(
            f"{row.devices:,}",
            name(row.price),
            format_short_duration(row.price.step_s),
            format_multiple(row.speedup),
            percent(row.efficiency),
            *(cells[column] for column in shown),
            plan.ranking.verdict(row),
            style="bold" if row is plan.chosen else "",
            chosen=row is plan.chosen,
        )
    return table


def _format_amounts(plan: Plan, row: PlanRow) -> dict[str, str]:
    """Return the cells of a row that not every plan has, "-" where they are not known."""
    total = format_cell_amount(row.hours)
    if plan.cost_model.wording.durations and row.hours is not None:
        total = format_short_duration(row.hours * 3600)
    return {
        plan.cost_model.wording.total: total,
        "kWh": format_cell_amount(row.energy_kwh),
        "USD": format_cell_amount(row.cost_usd),
        "spot USD": format_cell_amount(row.spot_usd),
        "cost": format_multiple(plan.ranking.relative_cost(row)) if _shows_cost(plan) else "-",
    }


def list_known(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """List the columns that have a value in any row."""
    return [column for column in (rows[0] if rows else ()) if any(cells[column] != "-" for cells in rows)]


def _shows_cost(plan: Plan) -> bool:
    return len(plan.rows) > 1 and not plan.target.shared


def _list_impossible(plan: Plan) -> Iterator[str]:
    """List numbers of devices without a row, and why."""
    for found in plan.misfits:
        near = min(found.rejected, key=lambda r: r.over_bytes or 1e30, default=None)
        text = f"{near.family}: {near.reason}" if near else f"no layout has {plan.cost_model.constraints.describe()}"
        yield f"{found.devices:,}: {text}"
    for rejected in plan.impossible:
        yield f"{rejected.devices:,}: {rejected.reason}"


def _list_remarks(plan: Plan) -> Iterator[str]:
    """List what the columns mean here, and what no row can exceed."""
    base, chosen = plan.base, plan.chosen
    if base is None or chosen is None:
        return
    if chosen.co2_kg is not None:
        grid = plan.rates.grid_g_per_kwh
        source = f" ({WORLD_SOURCE}; yours:  --grid GRAMS)" if grid == WORLD_G_PER_KWH else ""
        yield f"{number(chosen.co2_kg, 3)} kg of CO2 at {grid:g} g per kWh{source}"
    if text := plan.cost_model.describe_pauses(chosen.price):
        yield text
    fewest = ", the fewest that hold it" * (base.devices > 1)
    over = f"speed-ups are over {describe_base(plan.cost_model, base)}{fewest}"
    yield f"{over}{'; cost is over the cheapest' * _shows_cost(plan)}"
    if (plan.rates.take_spot or plan.rates.spot_usd is not None) and plan.cost_model.steps is not None:
        yield "Spot instances can be preempted; work since the last checkpoint is repeated."
    if (ceilings := plan.ceilings) is None or plan.target.shared:  # no law goes beyond the cores of a machine
        return
    serial = ceilings.serial_share
    share = f"{percent(serial) if serial >= 0.1 else f'{100 * serial:.2g} %'} serial"
    limits = [f"{format_multiple(ceilings.amdahl)} by Amdahl ({share})"] if ceilings.amdahl else []
    limits += [f"{format_multiple(ceilings.communication)} by communication"] if ceilings.communication else []
    if limits:
        yield f"limits of the speed-up with {plan.cost_model.wording.batch}: {', '.join(limits)}"


def _build_layout_table(found: SearchResult, chosen: PricedLayout | None) -> Table:
    """Tabulate layouts that fit on the chosen number of devices, fastest first."""
    shown = list(found.prices[:MAX_CANDIDATES])
    if chosen is not None and chosen not in shown:
        shown[-1] = chosen
    name = f"layouts on {found.devices:,}"
    table = Table(name, "pass", "×", "recompute", "step", "comm", "exposed", "memory", "of", mark=True)
    for p in shown:
        table.add_row(
            p.layout.family + " *" * p.layout.offload,
            f"{p.layout.micro_batch:,}",
            f"{p.passes:,}",
            p.layout.checkpointing,
            format_short_duration(p.step_s),
            format_short_duration(p.time.comm_s) if p.time.comm_s else "-",
            format_short_duration(p.time.exposed_s) if p.time.exposed_s else "-",
            size(p.memory.total_bytes) + (" !" if p.tight else ""),
            size(p.capacity_bytes),
            style="bold" if p is chosen else "",
            chosen=p is chosen,
        )
    return table


def _list_rejected(found: SearchResult) -> Iterator[str]:
    """List why other layouts are not in the table: a few reasons of different kinds, the simplest layouts first."""
    kinds: dict[tuple[object, ...], RejectedFamily] = {}
    for r in sorted(found.rejected, key=lambda r: (r.family not in ("single", "ddp"), r.parts, r.axes)):
        kinds.setdefault((*r.group, "tensor" in r.axes), r)
    shown = list(kinds.values())[:MAX_REJECTED]
    yield from (f"✗  {r.family}: {r.reason}" for r in shown)
    if len(found.rejected) > len(shown):
        yield f"   … and {len(found.rejected) - len(shown)} more, by  --json"


def _build_term_table(p: PricedLayout, wording: PlanWording, timeline: Timeline | None) -> Table:
    table = Table("memory per device", "", Column(f"  time per {wording.step}", "left"), "", Column("", "left"))
    memory = [(words, size(value)) for name, words in p.memory.terms.items() if (value := getattr(p.memory, name)) > 0]
    memory += [("total", size(p.memory.total_bytes)), ("  up to", size(p.memory_band_bytes[1]))]
    memory.append(("of", size(p.capacity_bytes)))
    outside = {"host memory": p.memory.host_bytes, "left on disk": p.memory.disk_bytes}
    memory += [(words, size(value)) for words, value in outside.items() if value]
    times = [
        (name, format_short_duration(value), words)
        for name, words in wording.times.items()
        if (value := getattr(p.time, name)) > 5e-4 * p.step_s or name == "compute_s"
    ]
    times.append(("step_s", format_short_duration(p.step_s), "the sum"))
    if timeline is not None:
        times.append(("simulated", format_short_duration(timeline.step_s), "the same, event by event"))
    if p.start_s:
        times.append(("start_s", format_short_duration(p.start_s), f"before the first {wording.step}"))
    if p.time.comm_s:
        ratio = p.compute_over_comm
        times.append(("comm_s", format_short_duration(p.time.comm_s), "in flight, hidden or not"))
        times.append(("comp/comm", f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}", "compute_s over comm_s"))
    for left, right in zip_longest(memory, times, fillvalue=("", "", "")):
        table.add_row(*left[:2], f"  {right[0]}", *right[1:])
    return table
