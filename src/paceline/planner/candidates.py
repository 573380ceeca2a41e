"""What a search goes through: families of layouts, limits that a run file sets, prices, and why a family cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from paceline.config import DEFAULT, RunSpec
from paceline.io.format import size
from paceline.layout import Layout
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.target import PricedCluster

MEMORY_ERROR = 0.13
"""Relative error within which four in five published figures lie, everything by the same people left out of the fit."""
PROCESS_BYTES = 2e9
"""Of host memory for each rank beside what is offloaded: libraries, driver, batches made ahead."""


@dataclass(frozen=True)
class PricedLayout:
    """A layout on as many devices as it has ranks."""

    layout: Layout
    where: PricedCluster
    time: StepTime
    memory: DeviceMemory
    start_s: float = 0.0
    """Before the first step, where that is priced."""

    @property
    def devices(self) -> int:
        return self.where.cluster.devices

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def passes(self) -> int:
        return self.layout.passes(self.layout.global_batch)

    @property
    def samples_s(self) -> float:
        return self.layout.global_batch / self.step_s

    @property
    def capacity_bytes(self) -> float:
        return self.where.cluster.device.memory_bytes

    @property
    def over_bytes(self) -> float:
        """How much the memory is missed by; below 0 where there is room."""
        return self.memory.held_bytes(self.where.cluster.device) - self.capacity_bytes

    @property
    def host_node_bytes(self) -> float:
        """Host memory that the ranks of one node take where states are offloaded; 0 where none are."""
        if not self.layout.offload:
            return 0.0
        return self.where.cluster.per_node * (self.memory.host_bytes + PROCESS_BYTES)

    @property
    def host_over_bytes(self) -> float:
        """How much the host memory is missed by; below 0 where there is room, or where nobody knows."""
        capacity = self.where.cluster.host_bytes
        return self.host_node_bytes - capacity if capacity is not None else -math.inf

    @property
    def fits(self) -> bool:
        return self.over_bytes <= 0 and self.host_over_bytes <= 0

    @property
    def tight(self) -> bool:
        """Fits, but not with the error of the estimate added."""
        return self.fits and self.memory.total_bytes * (1 + MEMORY_ERROR) > self.capacity_bytes

    @property
    def compute_over_comm(self) -> float:
        """R: time of the arithmetic over time that collectives are in flight."""
        return self.time.compute_s / self.time.comm_s if self.time.comm_s else float("inf")

    @property
    def waits_for_data(self) -> bool:
        """Long enough to say so."""
        return self.time.data_s > 0.05 * self.step_s

    def as_json(self) -> dict[str, Any]:
        """Every term, by its name with its unit."""
        totals = {"total_bytes": self.memory.total_bytes, "capacity_bytes": self.capacity_bytes}
        return {
            "layout": {**asdict(self.layout), "ranks": self.layout.ranks, "passes": self.passes},
            "time": {**asdict(self.time), "step_s": self.step_s},
            "memory": {**asdict(self.memory), **totals},
            "host": {"node_bytes": self.host_node_bytes, "capacity_bytes": self.where.cluster.host_bytes},
            "start_s": self.start_s,
            "samples_s": self.samples_s,
            "compute_over_comm": self.compute_over_comm,
            "fits": self.fits,
            "tight": self.tight,
        }


@dataclass(frozen=True)
class LayoutConstraints:
    """What the run file insists on; None leaves it to the search."""

    strategy: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    sequence: bool | None = None
    micro_batch: int | None = None
    activation_checkpointing: str | None = None
    offload: bool | None = None
    written: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """The fields of `parallel` that say so, as the run file has them."""

    def words(self) -> str:
        return " ".join(f"parallel.{name}={str(value).lower()}" for name, value in self.written)


CONSTRAINED_FIELDS = tuple(one.name for one in fields(LayoutConstraints) if one.name != "written")


def constraints_of(spec: RunSpec) -> LayoutConstraints:
    """The fields of `parallel` that were written down; `auto` leaves all of them to the search."""
    parallel = spec.parallel
    usual = type(parallel)()
    given = {}
    for name in CONSTRAINED_FIELDS:
        value = getattr(parallel, name)
        written = spec.origin(f"parallel.{name}") != DEFAULT or value != getattr(usual, name)
        if written and value not in (None, "auto"):
            given[name] = value
    said = tuple(given.items())
    if given.get("strategy") == "zero3":
        given["strategy"] = "fsdp"
    if parallel.reduce != "exact":  # for data parallelism alone
        given = {"strategy": "ddp", "tensor": 1, "pipeline": 1, **given}
        said = (*said, ("reduce", parallel.reduce))
    return LayoutConstraints(**given, written=said)


@dataclass(frozen=True)
class LayoutFamily:
    """Layouts that differ in batch, recomputation and offload alone."""

    base: Layout
    offloaded_only: bool = False
    """It makes sense only with states in host memory."""


def family_name(layout: Layout) -> str:
    return " + ".join(_family_parts(layout))


def _family_parts(layout: Layout) -> list[str]:
    strategy = layout.strategy
    if strategy == "hsdp":
        strategy += f" {layout.replicate}×{layout.shard}"
    axes = [f"{axis} {size}" for axis in ("tensor", "pipeline") if (size := getattr(layout, axis)) > 1]
    return axes if strategy == "single" and axes else [strategy, *axes]


class RejectReason(Enum):
    """Why a family of layouts cannot be; the value is the reason, with the facts of a `RejectedFamily` to be filled
    in."""

    NO_RULES = "{workload} has no rules to divide its layers"
    FP8 = "fp8 scales whole matrices"
    CROSSES_NODES = "tensor {tensor} crosses nodes of {per_node}"
    INDIVISIBLE = "{tensor} does not divide {size} heads or features"
    NO_LAYERS = "{workload} has no layers to divide among stages"
    FEW_LAYERS = "{layers} layers are fewer than {stages} stages"
    NO_CONTEXT = "context {context} does not divide them"
    NO_SAMPLE = "batch {batch} leaves some without a sample"
    UNFILLED = "{samples} per rank cannot fill {stages} stages"
    MEMORY = "{term} {over} over"
    MEMORY_OFFLOADED = "{term} {over} over even offloaded"
    HOST_MEMORY = "offloaded states take {needed_bytes} of host memory per node, which has {capacity_bytes}"
    NO_SUCH_CLUSTER = "{error}"


@dataclass(frozen=True)
class RejectedFamily:
    """A family of layouts that cannot be, and why."""

    devices: int
    family: str
    kind: RejectReason
    facts: Mapping[str, Any] = field(default_factory=dict)
    over_bytes: float = 0.0
    parts: int = 1
    """How many words the family's name joins: the fewer, the plainer it is."""
    axes: tuple[str, ...] = ()
    """Those of `tensor` and `pipeline` that it names."""
    nearest: PricedLayout | None = None
    """Its layout that needs the least memory, where that is what it misses."""

    @property
    def reason(self) -> str:
        facts = {name: size(fact) if name.endswith("_bytes") else fact for name, fact in self.facts.items()}
        over = self.over_bytes / 1e9
        return self.kind.value.format(**facts, over=f"{over:.0f} GB" if over >= 9.5 else f"{over:.1f} GB")

    @property
    def group(self) -> tuple[object, ...]:
        """What it has in common with refusals of the same kind, of which one is told."""
        memory = self.kind in (RejectReason.MEMORY, RejectReason.MEMORY_OFFLOADED)
        return (RejectReason.MEMORY, self.facts["term"]) if memory else (self.kind,)

    def as_json(self) -> dict[str, Any]:
        return {"devices": self.devices, "family": self.family, "reason": self.reason, "over_bytes": self.over_bytes}


def reject_family(
    family: LayoutFamily, kind: RejectReason, nearest: PricedLayout, over_bytes: float, **facts: Any
) -> RejectedFamily:
    """A family none of whose layouts fits."""
    layout = family.base
    axes = tuple(axis for axis in ("tensor", "pipeline") if getattr(layout, axis) > 1)
    return RejectedFamily(
        layout.ranks, family_name(layout), kind, facts, over_bytes, len(_family_parts(layout)), axes, nearest
    )
