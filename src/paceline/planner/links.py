"""Links: those that were measured on this machine, and the bandwidth below which more devices do not pay."""

import datetime
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from paceline.config.trust import get_state_folder
from paceline.hardware.catalogue import Cluster, match_driver_name
from paceline.io.files import read_json, write_json
from paceline.io.format import number, size
from paceline.planner.formulas.placement import CPU_PHYSICS, GPU_PHYSICS
from paceline.runlog.machine import describe_environment, list_gpu_names

if TYPE_CHECKING:
    from paceline.planner.candidates import PricedLayout
    from paceline.planner.plan import Plan

ENOUGH_RATIO = 3.0  # compute over communication from which devices usually pay
SLOW_SHARE = 0.25  # of the assumed bandwidth, at the slow end of the range that is shown for assumed links
WIDEST = 1e5  # factor around the present bandwidth within which the break-even is searched
CORES = "cores"


@dataclass(frozen=True)
class MeasuredLink:
    """The bandwidth of a ring of collectives on this machine, or between its nodes."""

    device: str  # as the driver names it, or `cores`
    ranks: int
    nodes: int
    bytes_s: float
    host: str
    date: str


def links_file() -> Path:
    """Return where `doctor --links` and `measure --links` store links, and plans look for them."""
    return get_state_folder() / "links.json"


def store_measured_link(bytes_s: float, ranks: int, nodes: int, on_gpu: bool) -> MeasuredLink:
    """Store a measured bandwidth for later plans; it replaces the one of the same devices."""
    gpus, file = list_gpu_names() if on_gpu else [], links_file()
    device, host = gpus[0] if gpus else CORES, str(describe_environment()["host"])
    link = MeasuredLink(device, ranks, nodes, bytes_s, host, datetime.date.today().isoformat())
    others = [old for old in read_measured_links() if (old.device, old.nodes > 1) != (link.device, link.nodes > 1)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"links": [asdict(one) for one in (*others, link)]})
    return link


def read_measured_links() -> list[MeasuredLink]:
    """Return the stored links; a file that is missing or damaged has none."""
    with suppress(Exception):
        return TypeAdapter(list[MeasuredLink]).validate_python(read_json(links_file())["links"])
    return []


def apply_measured_links(cluster: Cluster, local: bool) -> tuple[Cluster, str]:
    """Return the cluster with the links measured on its kind of device, and where they were; named links stay."""
    device, notes = cluster.device, []
    physics = CPU_PHYSICS if device.synchronous else GPU_PHYSICS
    for link in read_measured_links():
        known = match_driver_name(link.device) if link.device != CORES else None
        if not (local and device.synchronous if link.device == CORES else known and known.name == device.name):
            continue
        if link.nodes > 1 and cluster.nodes > 1 and cluster.node_bytes_s == device.node_bits_s / 8:
            cluster = replace(cluster, node_bytes_s=link.bytes_s / physics.node_efficiency)
        elif link.nodes == 1 and cluster.link_bytes_s == device.link_bytes_s:
            cluster = replace(cluster, link_bytes_s=link.bytes_s / physics.link_efficiency)
        else:
            continue
        notes.append(f"measured on {link.host}, {link.date}")
    return cluster, "; ".join(notes)


@dataclass(frozen=True)
class LinkLimits:
    """How the speed-up of a number of devices depends on the links between them."""

    devices: int
    nodes: int
    bytes_s: float  # that collectives reach in the plan
    measured: str  # where it was measured; "" if it is assumed
    break_even_bytes_s: float | None  # None if no bandwidth makes the devices pay, 0 if any does
    compute_over_comm: float
    slow_speedup: float  # at a quarter of the assumed bandwidth
    speedup: float

    def describe(self) -> str:
        """Return above which bandwidth the devices pay, what the plan has, and the ratio R with its rule."""
        devices, between = f"{self.devices:,} devices", "between nodes" if self.nodes > 1 else "between them"
        if self.break_even_bytes_s is None:
            return f"Faster links would not help: {devices} do not pay at any bandwidth {between}."
        limit = f"above {size(self.break_even_bytes_s)}/s" if self.break_even_bytes_s else "with any link"
        rate = f"{size(self.bytes_s)}/s"
        have = f"{rate} {self.measured}" if self.measured else f"assumed {rate}"
        if not self.measured:
            low, high = (f"{number(ratio, 2)}×" for ratio in (self.slow_speedup, self.speedup))
            have += f" ({low} with a quarter of it, {high} with all); measure yours:  paceline doctor --links"
        rule = "at least" if self.compute_over_comm >= ENOUGH_RATIO else "below"
        ratio = f"R = compute/communication = {number(self.compute_over_comm, 2)} ({rule} {ENOUGH_RATIO:g})"
        return f"{devices} pay {limit} {between}; {have}. {ratio}."


def find_link_limits(plan: "Plan") -> LinkLimits | None:
    """Find what links decide for the chosen row or, if it is the base, for the most devices; None without links."""
    base = plan.base
    rows = [row for row in plan.rows if base is not None and row.devices > base.devices and row.price.time.comm_s]
    if base is None or not rows:
        return None
    row = plan.chosen if plan.chosen in rows else rows[-1]
    assert row is not None
    cluster, physics = row.price.where.cluster, row.price.where.physics
    name, efficiency = "link_bytes_s", physics.link_efficiency
    if cluster.nodes > 1:
        name, efficiency = "node_bytes_s", physics.node_efficiency
    bytes_s = getattr(cluster, name) * efficiency

    def step_s(price: "PricedLayout", factor: float) -> float:
        links: dict[str, Any] = {name: getattr(price.where.cluster, name) * factor}
        where = replace(price.where, cluster=replace(price.where.cluster, **links))
        return plan.cost_model.price(price.layout, where).step_s

    def speedup(factor: float) -> float:
        return step_s(base, factor) / step_s(row.price, factor)

    return LinkLimits(
        row.devices,
        cluster.nodes,
        bytes_s,
        plan.target.links or (plan.target.calibrated and "as calibrated"),
        _find_break_even(speedup, bytes_s),
        row.price.compute_over_comm,
        speedup(SLOW_SHARE),
        row.speedup,
    )


def _find_break_even(speedup: Callable[[float], float], bytes_s: float) -> float | None:
    """Bisect the bandwidth at which the speed-up is 1; None if it never is more, 0 if it always is."""
    low, high = 1 / WIDEST, WIDEST
    if speedup(high) <= 1:
        return None
    if speedup(low) > 1:
        return 0.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if speedup(middle) > 1 else (middle, high)
    return bytes_s * high
