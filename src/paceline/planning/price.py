"""The price of one layout: the object that the runtime applies, put on a cluster, with its time and its memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from paceline.layout import Layout
from paceline.planning.formulas.memory import DeviceMemory
from paceline.planning.formulas.steptime import StepTime
from paceline.planning.site import Where

MEMORY_BAND = 0.13
"""Relative error within which four in five published figures lie, everything by the same people left out of the fit."""
PROCESS_BYTES = 2e9
"""Of host memory for each rank beside what is offloaded: libraries, driver, batches made ahead."""


@dataclass(frozen=True)
class Price:
    """A layout on as many devices as it has ranks."""

    layout: Layout
    where: Where
    time: StepTime
    memory: DeviceMemory
    start_s: float = 0.0
    """Before the first step, where that is priced."""

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
        return min(self.layout.ranks, self.where.cluster.per_node) * (self.memory.host_bytes + PROCESS_BYTES)

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
        return self.fits and self.memory.total_bytes * (1 + MEMORY_BAND) > self.capacity_bytes

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
