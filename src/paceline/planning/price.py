"""The price of one layout: the object that the runtime applies, put on a cluster, with its time and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from paceline.hardware.catalogue import Device
from paceline.layout import LOOPED, Layout
from paceline.planning.formulas.memory import Memory, memory
from paceline.planning.formulas.spread import Kernels, Recompute, Reduce, Schedule, Spread
from paceline.planning.formulas.steptime import StepTime, step_time
from paceline.planning.passtime import PassMemory, pass_memory, pass_time, start_s
from paceline.planning.site import Where
from paceline.planning.subject import Subject
from paceline.planning.topics import Counted

ZERO = {"zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 3, "hsdp": 3}
MEMORY_BAND = 0.13
"""Relative error within which four in five published figures lie, everything by the same people left out of the fit."""
WORKSPACE_BYTES, THREADS = float(32 << 20), 2
"""Of the library of products, for each stream of each thread that uses it: one goes forward, one backward."""
PROCESS_BYTES = 2e9
"""Of host memory for each rank beside what is offloaded: libraries, driver, batches made ahead."""
TERMS: dict[str, str] = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "states_bytes": "optimiser states",
    "activations_bytes": "activations",
    "logits_bytes": "logits",
    "gathered_bytes": "gathered layers",
    "buffers_bytes": "buffers, workspaces",
    "lost_bytes": "lost to fragments",
    "context_bytes": "driver, libraries",
}
"""The terms of the memory of a device, for people."""


@dataclass(frozen=True)
class Ways:
    """How plain data-parallel ranks are kept together: part of the run file, but not of the layout."""

    reduce: Reduce = "exact"
    local_steps: int = 8


EXACT = Ways()


@dataclass(frozen=True)
class Price:
    """A layout on as many devices as it has ranks."""

    layout: Layout
    where: Where
    time: StepTime
    memory: Memory | PassMemory
    passes: int
    global_batch: int
    start_s: float = 0.0
    """Before the first step, where that is priced."""

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def samples_s(self) -> float:
        return self.global_batch / self.step_s

    @property
    def capacity_bytes(self) -> float:
        return self.where.cluster.device.memory_bytes

    @property
    def over_bytes(self) -> float:
        """How much the memory is missed by; below 0 where there is room."""
        return device_bytes(self.memory, self.where.cluster.device) - self.capacity_bytes

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

    def largest_term(self) -> str:
        name = max(self.terms, key=lambda term: float(getattr(self.memory, term)))
        return self.terms[name]

    @property
    def terms(self) -> dict[str, str]:
        """Of the memory, for people."""
        return self.memory.terms if isinstance(self.memory, PassMemory) else TERMS

    def as_json(self) -> dict[str, Any]:
        """Every term, by its name with its unit."""
        layout = {f.name: getattr(self.layout, f.name) for f in fields(self.layout)}
        time = {f.name: getattr(self.time, f.name) for f in fields(self.time)} | {"step_s": self.step_s}
        terms = {f.name: getattr(self.memory, f.name) for f in fields(self.memory)}
        return {
            "layout": {**layout, "ranks": self.layout.ranks, "passes": self.passes},
            "time": time,
            "memory": {**terms, "total_bytes": self.memory.total_bytes, "capacity_bytes": self.capacity_bytes},
            "host": {"node_bytes": self.host_node_bytes, "capacity_bytes": self.where.cluster.host_bytes},
            "start_s": self.start_s,
            "samples_s": self.samples_s,
            "compute_over_comm": self.compute_over_comm,
            "fits": self.fits,
            "tight": self.tight,
        }


def device_bytes(memory: Memory | PassMemory, device: Device) -> float:
    """What a device holds. Cores have one memory: what is offloaded stays in it."""
    return memory.total_bytes + (memory.host_bytes if device.synchronous else 0.0)


def spread_of(layout: Layout, kernels: Kernels = "eager", ways: Ways = EXACT) -> Spread:
    """A layout as the formulas see it. The slowest rank counts: the one with the most samples."""
    passes = layout.passes(layout.global_batch)
    zero = ZERO.get(layout.strategy, 0)
    looped = layout.schedule in LOOPED and layout.pipeline > 1
    joined = ways.reduce in ("local_sgd", "diloco")
    return Spread(
        replicate=layout.replicate,
        shard=layout.shard,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        micro_batch=-(-layout.global_batch // layout.data) / passes,
        accumulate=passes,
        zero=zero,
        recompute=cast(Recompute, layout.checkpointing),
        sequence_parallel=layout.sequence,
        chunks=2 if looped else 1,
        kernels=kernels,
        offload=layout.offload,
        offload_weights=layout.offload and zero == 3,
        schedule=cast(Schedule, layout.schedule),
        keeps_casts=zero == 3,
        fused_update=True,
        stops_early=True,
        reduce=ways.reduce,
        local_steps=ways.local_steps if joined else 1,
    )


def placed(subject: Subject, layout: Layout, where: Where, ways: Ways = EXACT) -> Spread:
    """A layout of a run on its devices: what is compiled there, and what stays in memory."""
    half_on_gpu = subject.numbers.element_bytes == 2 and not where.cluster.device.synchronous
    recorded = (
        subject.records
        and half_on_gpu
        and layout.ranks == 1
        and layout.plain
        and layout.checkpointing == "none"
        and layout.passes(layout.global_batch) == 1
    )
    kernels: Kernels = "compiled" if recorded or (subject.compiles and half_on_gpu) else "eager"
    spread = spread_of(layout, kernels, ways)
    fully = spread.zero == 3
    return replace(
        spread,
        recorded=recorded,
        fresh_gradients=spread.accumulate == 1 and layout.pipeline == 1 and (fully or layout.strategy == "single"),
        keeps_casts=fully and not subject.narrow_gathers,
        keeps_ends=fully and subject.narrow_gathers,
    )


def memory_of(subject: Subject, layout: Layout, where: Where, spread: Spread | None = None) -> Memory | PassMemory:
    """Of the fullest device, with the longest samples in one pass."""
    if subject.counts is not None:
        return pass_memory(subject.counts, -(-layout.global_batch // layout.data), layout.ranks, where)
    spread = spread or placed(subject, layout, where)
    fullest = replace(spread, micro_batch=spread.micro_batch * subject.fullest(spread.micro_batch))
    found = memory(subject.blocks, fullest, subject.numbers, where.physics)
    if not where.cluster.device.synchronous:
        streams = 2 if spread.recorded and spread.kernels == "compiled" else 1
        found = replace(found, buffers_bytes=found.buffers_bytes + THREADS * streams * WORKSPACE_BYTES)
    if spread.zero == 2:  # weights stay gathered, beside the shard that the update works on
        found = replace(found, gathered_bytes=found.gathered_bytes + found.weights_bytes / spread.shard)
    return found


def price(subject: Subject, layout: Layout, where: Where, ways: Ways = EXACT) -> Price:
    if subject.counts is not None:
        return _price_pass(subject.counts, layout, where)
    device, numbers = where.cluster.device, subject.numbers
    half_on_gpu = numbers.element_bytes == 2 and not device.synchronous
    spread = placed(subject, layout, where, ways)
    blocks = subject.launched(spread.micro_batch, half_on_gpu)
    time = step_time(blocks, spread, where.cluster, numbers, where.physics)
    read_s = spread.micro_batch * spread.accumulate * subject.sample_bytes / where.physics.input_bytes_s
    time = replace(time, data_s=max(0.0, read_s - time.step_s))  # batches are made ahead, beside the step
    return Price(
        layout=layout,
        where=where,
        time=time,
        memory=memory_of(subject, layout, where, spread),
        passes=spread.accumulate,
        global_batch=layout.global_batch,
    )


def _price_pass(counts: Counted, layout: Layout, where: Where) -> Price:
    """A pass of a topic model over as many documents as the layout's batch has."""
    documents, ranks = -(-layout.global_batch // layout.data), layout.ranks
    found = pass_memory(counts, documents, ranks, where)
    time = pass_time(counts, documents, ranks, where, found)
    before_s = start_s(counts, documents, ranks, where, time.step_s)
    return Price(layout, where, time, found, 1, layout.global_batch, before_s)
