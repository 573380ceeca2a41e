"""A plan on a terminal: what fits in 100 columns and is read from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from paceline.hardware.catalogue import HOST
from paceline.planning.candidates import MEMORY_BAND, Price, Refused, family_name
from paceline.planning.plan import Plan, PlannedRow
from paceline.planning.search import Found
from paceline.planning.subject import Wording
from paceline.record.plain_table import PlainTable
from paceline.record.units import number, percent, size, wrapped

MOST_CANDIDATES = 6
MOST_REFUSED = 4


def show(plan: Plan) -> Iterator[Any]:
    """What to print, part by part, for rich."""
    yield from _head(plan)
    yield ""
    if plan.rows:
        yield _devices(plan)
    yield from _not_possible(plan)
    if plan.rows:
        yield from _below_devices(plan)
    chosen, wording = plan.chosen, plan.subject.wording
    if wording.several_layouts:
        for found in (chosen.found,) if chosen else plan.out[-1:]:
            yield ""
            if found.prices:
                yield _layouts(found.devices, found.prices, chosen.price if chosen else None)
            yield from _refused(found)
            if found.usual is not None:
                yield from wrapped(found.usual.words(), "  ")
    if chosen is not None:
        yield ""
        yield _terms(chosen.price, wording)
    yield ""
    for line in plan.advice:
        yield from wrapped(line, "→ ")
    if chosen is not None:
        yield from wrapped(" ".join(f"{key}={str(value).lower()}" for key, value in plan.overrides().items()), "  ")


def _head(plan: Plan) -> Iterator[str]:
    subject, site = plan.subject, plan.site
    where = site.whole
    yield from wrapped(subject.headline(), "")
    links = f"{size(where.link_bytes_s)}/s in a node" if where.per_node > 1 and where.link_bytes_s > 1 else ""
    network = f"{number(where.node_bytes_s * 8 / 1e9, 3)} Gbit/s per node" if where.nodes > 1 else ""
    price = f"{plan.usd_per_device_hour:g} USD per device and hour" if plan.usd_per_device_hour is not None else ""
    shape = f"{f'{where.nodes} × ' * (where.nodes > 1)}{where.per_node} × {where.device.name}"
    if site.shared:
        shape = f"this machine, {where.device.name} shared by up to {where.devices} ranks"
    yield from wrapped(", ".join(filter(None, (f"{site.name} = {shape}", links, network, price))), "")
    if calibration := site.calibration:
        yield f"calibrated on {calibration.host}, {calibration.date}: {calibration.file}"
        if calibration.correction is not None:
            yield from wrapped(calibration.correction.words(), "  ")
    elif site.shared:
        yield "not calibrated, rates by rule of thumb; measure this machine with  paceline calibrate"
    if site.note:
        yield site.note
    if words := plan.limits.words():
        yield f"as the run file insists: {words}"
    for text in subject.assumptions:
        yield f"assumed: {text}"


def _devices(plan: Plan) -> Any:
    wording, name = plan.subject.wording, plan.subject.layout_name
    columns = ["", "devices", wording.layout, wording.step, "speed-up", "eff.", "comp/comm", wording.total]
    columns += ["device-h", "kWh"]
    priced = plan.usd_per_device_hour is not None
    table = PlainTable(*columns, *(["USD"] if priced else []), left=3)
    for row in plan.rows:
        table.add_row(
            "✓" if row is plan.chosen else " ",
            f"{row.devices:,}",
            name(row.price),
            _short(row.price.step_s),
            _times(row.speedup),
            percent(row.efficiency),
            _ratio(row.price.compute_over_comm),
            _short(row.hours * 3600) if wording.durations and row.hours is not None else _amount(row.hours),
            _amount(row.device_hours),
            _amount(row.energy_kwh),
            *([_amount(row.cost_usd)] if priced else []),
            style="bold" if row is plan.chosen else "",
        )
    return table


def _not_possible(plan: Plan) -> Iterator[str]:
    """Numbers of devices without a row, and why."""
    for found in plan.out:
        why = min(found.refused, key=lambda r: r.over_bytes or 1e30, default=None)
        text = f"{why.family}: {why.reason}" if why else f"no layout has {plan.limits.words()}"
        yield from wrapped(f"{found.devices:,}: {text}", "✗  ")
    for refused in plan.impossible:
        yield from wrapped(f"{refused.devices:,}: {refused.reason}", "✗  ")


def _below_devices(plan: Plan) -> Iterator[str]:
    if plan.chosen is not None and (said := plan.subject.pause_words(plan.chosen.price)):
        yield from wrapped(said, "")
    if offloaded := [row.price for row in plan.rows if row.price.layout.offload]:
        most = max(p.host_node_bytes for p in offloaded)
        if offloaded[0].where.cluster.host_bytes is not None or offloaded[0].where.cluster.device.synchronous:
            yield "* states in host memory"
        else:
            yield from wrapped(
                f"* states in host memory, {size(most)} per node; how much a node has is not known, and not checked: "
                f"say it in a cluster file with  {HOST}: {round(most / 1e9)}",
                "",
            )
    if len(plan.rows) < 2 or plan.cheapest is None or plan.fastest is None:
        return
    parts = [f"cheapest {_who(plan.cheapest)}", f"fastest {_who(plan.fastest)}"]
    if plan.cheapest is plan.fastest:
        parts = [f"cheapest and fastest {_who(plan.fastest)}"]
    if plan.break_even:
        parts.append(f"{plan.break_even} devices beat one")
        if plan.pays_until and plan.pays_until < plan.rows[-1].devices:
            parts.append(f"beyond {plan.pays_until:,} a doubling adds less than a fifth")
    else:
        parts.append("no number of devices beats one")
    yield from wrapped(", ".join(parts), "")
    ceilings = plan.ceilings
    serial = ceilings.serial_share
    share = f"{percent(serial) if serial >= 0.1 else f'{100 * serial:.2g} %'} serial"
    limits = [f"{_times(ceilings.amdahl)} by Amdahl ({share})"] if ceilings.amdahl else []
    limits += [f"{_times(ceilings.communication)} by communication"] if ceilings.communication else []
    if limits:
        yield f"limits of the speed-up with {plan.subject.wording.batch}: {', '.join(limits)}"
    if not plan.one_device_fits:
        yield "speed-ups are over one device with enough memory"


def _who(row: PlannedRow) -> str:
    if row.hours is None:
        return f"{row.devices:,}"
    cost = f", {_amount(row.cost_usd)} USD" if row.cost_usd is not None else ""
    hours = f"{_amount(row.hours)} h" if row.hours >= 0.01 else _short(row.hours * 3600)
    return f"{row.devices:,} ({hours}{cost})"


def _layouts(devices: int, prices: tuple[Price, ...], chosen: Price | None) -> Any:
    """Layouts that fit on the chosen number of devices, fastest first."""
    shown = list(prices[:MOST_CANDIDATES])
    if chosen is not None and chosen not in shown:
        shown[-1] = chosen
    columns = ("", f"layouts on {devices:,}", "pass", "×", "recompute", "step", "comm", "exposed", "memory", "of")
    table = PlainTable(*columns, left=2)
    for p in shown:
        table.add_row(
            "✓" if p is chosen else " ",
            family_name(p.layout) + " *" * p.layout.offload,
            f"{p.layout.micro_batch:,}",
            f"{p.passes:,}",
            p.layout.checkpointing,
            _short(p.step_s),
            _short(p.time.comm_s) if p.time.comm_s else "-",
            _short(p.time.exposed_s) if p.time.exposed_s else "-",
            size(p.memory.total_bytes) + (" !" if p.tight else ""),
            size(p.capacity_bytes),
            style="bold" if p is chosen else "",
        )
    return table


def _refused(found: Found) -> Iterator[str]:
    """Why others are not in the table."""
    told = _telling(found.refused)
    for r in told:
        yield f"✗  {r.family}: {r.reason}"
    slower, impossible = max(0, len(found.prices) - MOST_CANDIDATES), len(found.refused) - len(told)
    more = [f"{slower} slower"] * (slower > 0) + [f"{impossible} impossible"] * (impossible > 0)
    if more:
        yield f"   … {' and '.join(more)} more, with every term, by  --json"


def _telling(refused: tuple[Refused, ...]) -> list[Refused]:
    """A few reasons of different kinds: the plainest layouts first."""
    kinds: dict[tuple[object, ...], Refused] = {}
    for r in sorted(refused, key=lambda r: (r.parts, "pipeline" in r.axes, "tensor" in r.axes)):
        kinds.setdefault((*r.group, "tensor" in r.axes), r)
    plain = [r for r in refused if r.family in ("single", "ddp")]
    rest = [r for r in kinds.values() if r not in plain]
    return [*plain, *rest][:MOST_REFUSED]


def _terms(p: Price, wording: Wording) -> Any:
    """Memory and time of the chosen layout, side by side."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head, numbers in (("memory per device", 0), ("", 1), (f"  time per {wording.step}", 0), ("", 1), ("", 0)):
        table.add_column(head, justify="right" if numbers else "left", no_wrap=bool(numbers))
    memory = [(words, size(value)) for name, words in p.memory.terms.items() if (value := getattr(p.memory, name)) > 0]
    memory += [(f"total, ± {percent(MEMORY_BAND)}", size(p.memory.total_bytes)), ("of", size(p.capacity_bytes))]
    if p.memory.host_bytes:
        memory.append(("host memory", size(p.memory.host_bytes)))
        if p.layout.offload:
            memory.append(("all ranks of a node", size(p.host_node_bytes)))
            memory.append(("of", size(known) if (known := p.where.cluster.host_bytes) else "not known"))
    if p.memory.disk_bytes:
        memory.append(("left on disk", size(p.memory.disk_bytes)))
    times = [
        (name, _short(value), words)
        for name, words in wording.times.items()
        if (value := getattr(p.time, name)) > 5e-4 * p.step_s or name == "compute_s"
    ]
    times.append(("step_s", _short(p.step_s), "the sum"))
    if p.start_s:
        times.append(("start_s", _short(p.start_s), f"before the first {wording.step}"))
    if p.time.comm_s:
        times.append(("comm_s", _short(p.time.comm_s), "in flight, hidden or not"))
    for left, right in zip_longest(memory, times, fillvalue=("", "", "")):
        table.add_row(*left[:2], f"  {right[0]}", *right[1:])
    return table


def _short(seconds: float) -> str:
    """A duration in few columns: 12.3 ms, 1.82 s, 23.9 min, 3.1 h."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= scale * (1 if unit == "s" else 1.5):
            return f"{number(seconds / scale, 3)} {unit}"
    return f"{number(seconds * 1e3, 3)} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×" if ratio < 99.95 else f"{ratio:,.0f}×"


def _ratio(value: float) -> str:
    return "-" if value == float("inf") else f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _amount(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.095 else f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"
