"""Render a plan for the terminal, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from paceline.hardware.catalogue import HOST
from paceline.io.format import format_short_duration, number, percent, size, wrap_lines
from paceline.io.table import Column, Table
from paceline.planner.advice import describe_base
from paceline.planner.candidates import MEMORY_ERROR, PricedLayout, RejectedFamily, family_name
from paceline.planner.cost_model import PlanWording
from paceline.planner.plan import Plan
from paceline.planner.rows import PlanRow
from paceline.planner.search import SearchResult


def format_multiple(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×" if ratio < 99.95 else f"{ratio:,.0f}×"


def format_ratio(value: float) -> str:
    return "-" if value == float("inf") else f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def format_cell_amount(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.095 else f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"


MAX_CANDIDATES = 6
MAX_REJECTED = 4
WIDE_NAME = 20
"""Characters of a layout's name that leave room for all columns."""


def render_plan(plan: Plan) -> Iterator[Any]:
    """What to print, part by part, for rich."""
    yield from _render_head(plan)
    yield ""
    if plan.rows:
        yield _build_device_table(plan)
    yield from _list_impossible(plan)
    if plan.rows:
        yield from _list_remarks(plan)
    chosen, wording = plan.chosen, plan.subject.wording
    if wording.several_layouts:
        for found in (chosen.found,) if chosen else plan.out[-1:]:
            yield ""
            if found.prices:
                yield _build_layout_table(found.devices, found.prices, chosen.price if chosen else None)
            yield from _list_rejected(found)
            if found.usual is not None:
                yield from wrap_lines(found.usual.words(), "  ")
    if chosen is not None:
        yield ""
        yield _build_term_table(chosen.price, wording)
    yield ""
    for line in plan.advice:
        yield from wrap_lines(line, "→ ")
    if chosen is not None and not plan.what_if:
        yield from wrap_lines(" ".join(f"{key}={str(value).lower()}" for key, value in plan.overrides().items()), "  ")


def _render_head(plan: Plan) -> Iterator[str]:
    subject, site = plan.subject, plan.site
    where = site.whole
    yield from wrap_lines(subject.headline(), "")
    links = f"{size(where.link_bytes_s)}/s in a node" if where.per_node > 1 and where.link_bytes_s > 1 else ""
    network = f"{number(where.node_bytes_s * 8 / 1e9, 3)} Gbit/s per node" if where.nodes > 1 else ""
    rates = plan.rates
    price = f"{rates.usd:g} USD per {'machine' if site.shared else 'device'} and hour" if rates.usd is not None else ""
    if rates.take_spot:
        price += " as spot"
    elif rates.spot_usd is not None:
        price += f"{' (' if price else ''}{rates.spot_usd:g}{' as' if price else ' USD'} spot{')' if price else ''}"
    shape = f"{f'{where.nodes} × ' * (where.nodes > 1)}{where.per_node} × {where.device.name}"
    if site.shared:
        shape = f"this machine, {where.device.name} shared by up to {where.devices} ranks"
    yield from wrap_lines(", ".join(filter(None, (f"{site.name} = {shape}", links, network, price))), "")
    if calibration := site.calibration:
        yield f"calibrated on {calibration.host}, {calibration.date}: {calibration.file}"
        if calibration.correction is not None:
            yield from wrap_lines(calibration.correction.words(), "  ")
    elif site.shared:
        yield "not calibrated, rates by rule of thumb; measure this machine with  paceline calibrate"
    if site.note:
        yield site.note
    if plan.spec.parallel.backend == "gloo" and not where.device.synchronous:
        yield "priced with a device for each rank; with parallel.backend=gloo ranks can share one, and take turns"
    if plan.what_if:
        yield from wrap_lines(f"what if: {plan.what_if.words()} (priced only: training does not do this)", "")
    if words := plan.limits.words():
        yield f"as the run file insists: {words}"
    for text in subject.assumptions:
        yield f"assumed: {text}"


def _build_device_table(plan: Plan) -> Any:
    wording, name, choice = plan.subject.wording, plan.subject.layout_name, plan.choice
    roomy = max(len(name(row.price)) for row in plan.rows) <= WIDE_NAME
    known = any(row.hours is not None for row in plan.rows)
    optional = {
        wording.total: known,
        "kWh": known and roomy,
        "USD": known and plan.rates.usd is not None,
        "spot USD": known and plan.rates.spot_usd is not None and roomy,
        "cost": _shows_cost(plan),
    }
    shown = [column for column, wanted in optional.items() if wanted]
    columns = ["", "devices", wording.layout, wording.step, "speed-up", "eff.", *shown, Column("verdict", "left")]
    table = Table(*columns, left=3)
    for row in plan.rows:
        long = (
            format_short_duration(row.hours * 3600)
            if wording.durations and row.hours is not None
            else format_cell_amount(row.hours)
        )
        amounts = {
            wording.total: long,
            "kWh": format_cell_amount(row.energy_kwh),
            "USD": format_cell_amount(row.cost_usd),
            "spot USD": format_cell_amount(row.spot_usd),
            "cost": format_multiple(choice.relative_cost(row)),
        }
        table.add_row(
            "✓" if row is plan.chosen else " ",
            f"{row.devices:,}",
            name(row.price),
            format_short_duration(row.price.step_s),
            format_multiple(row.speedup),
            percent(row.efficiency),
            *(amounts[column] for column in shown),
            choice.verdict(row),
            style="bold" if row is plan.chosen else "",
        )
    return table


def _shows_cost(plan: Plan) -> bool:
    """More devices cost more, and so rows differ in it."""
    return len(plan.rows) > 1 and not plan.site.shared


def _list_impossible(plan: Plan) -> Iterator[str]:
    """Numbers of devices without a row, and why."""
    for found in plan.out:
        why = min(found.refused, key=lambda r: r.over_bytes or 1e30, default=None)
        text = f"{why.family}: {why.reason}" if why else f"no layout has {plan.limits.words()}"
        yield from wrap_lines(f"{found.devices:,}: {text}", "✗  ")
    for refused in plan.impossible:
        yield from wrap_lines(f"{refused.devices:,}: {refused.reason}", "✗  ")


def _list_remarks(plan: Plan) -> Iterator[str]:
    if plan.chosen is not None and (said := plan.subject.describe_pauses(plan.chosen.price)):
        yield from wrap_lines(said, "")
    if offloaded := [row.price for row in plan.rows if row.price.layout.offload]:
        most = max(p.host_node_bytes for p in offloaded)
        if offloaded[0].where.cluster.host_bytes is not None or offloaded[0].where.cluster.device.synchronous:
            yield "* states in host memory"
        else:
            yield from wrap_lines(
                f"* states in host memory, {size(most)} per node; how much a node has is not known, and not checked: "
                f"say it in a cluster file with  {HOST}: {round(most / 1e9)}",
                "",
            )
    yield from _compare_rows(plan)


def _compare_rows(plan: Plan) -> Iterator[str]:
    """The rows beside each other, and what no row can pass."""
    base, choice = plan.base, plan.choice
    assert base is not None
    if len(plan.rows) > 1:
        best = {"fastest": choice.fastest, "cheapest": choice.cheapest, "most efficient": choice.most_efficient}
        best["knee of time and money"] = choice.knee
        if choice.one_machine:
            best = {"fastest": choice.fastest}
        names = {row.devices: [name for name, other in best.items() if other is row] for row in plan.rows}
        rows = sorted((row for row in plan.rows if names[row.devices]), key=lambda row: row.run_s)
        yield from wrap_lines("; ".join(f"{_join_words(names[row.devices])}: {_describe_row(row)}" for row in rows), "")
    yield from wrap_lines(_describe_requirements(plan), "")
    fewest = ""
    if base.devices > 1:
        fewest = ", the fewest that hold it"
        elsewhere = any(row.price.layout.offload for row in plan.rows) and not base.layout.offload
        fewest += " without host memory" * elsewhere
        fewest += " as the run file insists" * bool(plan.limits.words())
    yield from wrap_lines(
        (
            "speed-ups are over "
            f"{describe_base(plan.subject, base)}{fewest}{'; cost is over the cheapest' * _shows_cost(plan)}"
        ),
        "",
    )
    if (plan.rates.take_spot or plan.rates.spot_usd is not None) and plan.subject.steps is not None:
        yield "spot devices may be taken away: what was done since the last checkpoint is then done again"
    if (ceilings := plan.ceilings) is None or plan.site.shared:  # no law goes beyond the cores of a machine
        return
    serial = ceilings.serial_share
    share = f"{percent(serial) if serial >= 0.1 else f'{100 * serial:.2g} %'} serial"
    limits = [f"{format_multiple(ceilings.amdahl)} by Amdahl ({share})"] if ceilings.amdahl else []
    limits += [f"{format_multiple(ceilings.communication)} by communication"] if ceilings.communication else []
    if limits:
        yield f"limits of the speed-up with {plan.subject.wording.batch}: {', '.join(limits)}"


def _join_words(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _describe_requirements(plan: Plan) -> str:
    """What was asked for, and whether a row keeps to it."""
    wishes, chosen = plan.wishes, plan.chosen
    asked = []
    if wishes.deadline_h is not None:
        asked.append(f"a deadline of {wishes.deadline_h:,.6g} h")
    if wishes.budget_usd is not None:
        asked.append(f"a budget of {wishes.budget_usd:,.10g} USD")
    if wishes.min_efficiency is not None:
        asked.append(f"an efficiency of at least {percent(wishes.min_efficiency)}")
    if chosen is None:
        return ""
    if not asked:
        return "" if chosen is plan.choice.fastest else "✓ is as fast as any within 5 %, with the fewest devices"
    if not plan.choice.kept:
        return f"no row keeps to {_join_words(asked)}; ✓ comes nearest"
    what = "cheapest" if wishes.deadline_h is not None else "fastest"
    return f"✓ is the {what} that keeps to {_join_words(asked)}"


def _describe_row(row: PlanRow) -> str:
    if row.hours is None:
        return f"{row.devices:,}"
    cost = f", {format_cell_amount(row.cost_usd)} USD" if row.cost_usd is not None else ""
    hours = f"{format_cell_amount(row.hours)} h" if row.hours >= 0.01 else format_short_duration(row.hours * 3600)
    return f"{row.devices:,} ({hours}{cost})"


def _build_layout_table(devices: int, prices: tuple[PricedLayout, ...], chosen: PricedLayout | None) -> Any:
    """Layouts that fit on the chosen number of devices, fastest first."""
    shown = list(prices[:MAX_CANDIDATES])
    if chosen is not None and chosen not in shown:
        shown[-1] = chosen
    columns = ("", f"layouts on {devices:,}", "pass", "×", "recompute", "step", "comm", "exposed", "memory", "of")
    table = Table(*columns, left=2)
    for p in shown:
        table.add_row(
            "✓" if p is chosen else " ",
            family_name(p.layout) + " *" * p.layout.offload,
            f"{p.layout.micro_batch:,}",
            f"{p.passes:,}",
            p.layout.checkpointing,
            format_short_duration(p.step_s),
            format_short_duration(p.time.comm_s) if p.time.comm_s else "-",
            format_short_duration(p.time.exposed_s) if p.time.exposed_s else "-",
            size(p.memory.total_bytes) + (" !" if p.tight else ""),
            size(p.capacity_bytes),
            style="bold" if p is chosen else "",
        )
    return table


def _list_rejected(found: SearchResult) -> Iterator[str]:
    """Why others are not in the table."""
    told = _select_rejected(found.refused)
    for r in told:
        yield f"✗  {r.family}: {r.reason}"
    slower, impossible = max(0, len(found.prices) - MAX_CANDIDATES), len(found.refused) - len(told)
    more = [f"{slower} slower"] * (slower > 0) + [f"{impossible} impossible"] * (impossible > 0)
    if more:
        yield f"   … {' and '.join(more)} more, with every term, by  --json"


def _select_rejected(refused: tuple[RejectedFamily, ...]) -> list[RejectedFamily]:
    """A few reasons of different kinds: the plainest layouts first."""
    kinds: dict[tuple[object, ...], RejectedFamily] = {}
    for r in sorted(refused, key=lambda r: (r.parts, "pipeline" in r.axes, "tensor" in r.axes)):
        kinds.setdefault((*r.group, "tensor" in r.axes), r)
    plain = [r for r in refused if r.family in ("single", "ddp")]
    rest = [r for r in kinds.values() if r not in plain]
    return [*plain, *rest][:MAX_REJECTED]


def _build_term_table(p: PricedLayout, wording: PlanWording) -> Any:
    """Memory and time of the chosen layout, side by side."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head, numbers in (("memory per device", 0), ("", 1), (f"  time per {wording.step}", 0), ("", 1), ("", 0)):
        table.add_column(head, justify="right" if numbers else "left", no_wrap=bool(numbers))
    memory = [(words, size(value)) for name, words in p.memory.terms.items() if (value := getattr(p.memory, name)) > 0]
    memory += [(f"total, ± {percent(MEMORY_ERROR)}", size(p.memory.total_bytes)), ("of", size(p.capacity_bytes))]
    if p.memory.host_bytes:
        memory.append(("host memory", size(p.memory.host_bytes)))
        if p.layout.offload:
            memory.append(("all ranks of a node", size(p.host_node_bytes)))
            memory.append(("of", size(known) if (known := p.where.cluster.host_bytes) else "not known"))
    if p.memory.disk_bytes:
        memory.append(("left on disk", size(p.memory.disk_bytes)))
    times = [
        (name, format_short_duration(value), words)
        for name, words in wording.times.items()
        if (value := getattr(p.time, name)) > 5e-4 * p.step_s or name == "compute_s"
    ]
    times.append(("step_s", format_short_duration(p.step_s), "the sum"))
    if p.start_s:
        times.append(("start_s", format_short_duration(p.start_s), f"before the first {wording.step}"))
    if p.time.comm_s:
        times.append(("comm_s", format_short_duration(p.time.comm_s), "in flight, hidden or not"))
        times.append(("comp/comm", format_ratio(p.compute_over_comm), "compute_s over comm_s"))
    for left, right in zip_longest(memory, times, fillvalue=("", "", "")):
        table.add_row(*left[:2], f"  {right[0]}", *right[1:])
    return table
