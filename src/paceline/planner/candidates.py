"""Candidates of a search: layouts with their price, and families of layouts that were rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from paceline.io.format import size
from paceline.layout import Layout
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.target import PricedCluster

MEMORY_ERROR = 0.13
"""Relative error within which four in five published figures lie, everything by the same people left out of the fit."""
PROCESS_BYTES = 2e9
"""Host memory of each rank beside what is offloaded: libraries, driver, prefetched batches."""


@dataclass(frozen=True)
class PricedLayout:
    """A layout on as many devices as it has ranks, with the time and memory of a step."""

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
        """Bytes by which it exceeds the memory of the device; negative where there is room."""
        return self.memory.held_bytes(self.where.cluster.device) - self.capacity_bytes

    @property
    def host_node_bytes(self) -> float:
        """Host memory that the ranks of one node need if states are offloaded, else 0."""
        if not self.layout.offload:
            return 0.0
        return self.where.cluster.per_node * (self.memory.host_bytes + PROCESS_BYTES)

    @property
    def host_over_bytes(self) -> float:
        """Bytes by which it exceeds the host memory of a node; negative where there is room, or none is known."""
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
        return self.time.compute_s / self.time.comm_s if self.time.comm_s else float("inf")

    @property
    def waits_for_data(self) -> bool:
        """Waits long enough to mention it."""
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


def family_name(layout: Layout) -> str:
    """Name what layouts have in common that differ in micro-batch, recomputation and offload alone."""
    return " + ".join(_family_parts(layout))


def _family_parts(layout: Layout) -> list[str]:
    strategy = layout.strategy
    if strategy == "hsdp":
        strategy += f" {layout.replicate}×{layout.shard}"
    axes = [f"{axis} {getattr(layout, axis)}" for axis in split_axes(layout)]
    return axes if strategy == "single" and axes else [strategy, *axes]


def split_axes(layout: Layout) -> tuple[str, ...]:
    """Those of `tensor` and `pipeline` along which a layout divides the model."""
    return tuple(axis for axis in ("tensor", "pipeline") if getattr(layout, axis) > 1)


class RejectReason(Enum):
    """Why a family of layouts is rejected; the value is the sentence, with the facts of a `RejectedFamily` missing."""

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
    HOST_MEMORY = "offloaded states need {needed_bytes} of host memory per node, which has {capacity_bytes}"
    NO_SUCH_CLUSTER = "{error}"


@dataclass(frozen=True)
class RejectedFamily:
    """A family of layouts that is not possible or does not fit, and why."""

    devices: int
    family: str
    code: RejectReason
    facts: Mapping[str, Any] = field(default_factory=dict)
    over_bytes: float = 0.0
    parts: int = 1
    """Words that the family's name joins: the fewer, the simpler."""
    axes: tuple[str, ...] = ()
    """Those of `tensor` and `pipeline` that it uses."""
    nearest: PricedLayout | None = None
    """Its layout that needs the least memory, if memory is the reason."""

    @classmethod
    def of(cls, nearest: PricedLayout, code: RejectReason, over_bytes: float, **facts: Any) -> RejectedFamily:
        """Reject a family none of whose layouts fits; `nearest` exceeds the memory by `over_bytes`."""
        layout = nearest.layout
        parts, axes = len(_family_parts(layout)), split_axes(layout)
        return cls(layout.ranks, family_name(layout), code, facts, over_bytes, parts, axes, nearest)

    @property
    def reason(self) -> str:
        facts = {name: size(fact) if name.endswith("_bytes") else fact for name, fact in self.facts.items()}
        over = self.over_bytes / 1e9
        return self.code.value.format(**facts, over=f"{over:.0f} GB" if over >= 9.5 else f"{over:.1f} GB")

    @property
    def group(self) -> tuple[object, ...]:
        """Key of rejections that are alike, of which one is shown."""
        memory = self.code in (RejectReason.MEMORY, RejectReason.MEMORY_OFFLOADED)
        return (RejectReason.MEMORY, self.facts["term"]) if memory else (self.code,)

    def as_json(self) -> dict[str, Any]:
        return {"devices": self.devices, "family": self.family, "reason": self.reason, "over_bytes": self.over_bytes}
