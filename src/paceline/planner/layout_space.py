"""Every layout that a training could have on a number of devices, and why the others cannot be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.hardware.catalogue import Cluster
from paceline.layout import Layout
from paceline.planner.candidates import LayoutConstraints, LayoutFamily, RejectedFamily, RejectReason

SEARCHED_STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2")
"""In the order in which people try them. zero3 is fsdp by another name."""
UNSHARDED_STRATEGIES = ("single", "ddp", "zero1")
"""Those under which every rank holds all weights."""
CHECKPOINTING = ("none", "selective", "full")
MAX_TENSOR = 16
MAX_STAGES = 64
OFFLOADABLE_STRATEGIES = ("zero2", "fsdp", "hsdp")


@dataclass(frozen=True)
class SplitOptions:
    """What of a model can be divided among ranks beside its samples."""

    splits: tuple[int, ...] = ()
    """Numbers that the ranks of `tensor` must divide; empty where the model cannot be divided."""
    sequence: int = 0
    """Positions that the ranks of `tensor` may divide among them; 0 where they cannot."""
    layers: int = 0
    """Layers that a pipeline can divide; 0 where it cannot."""
    recomputes: bool = True
    """Has repeated layers, which activation checkpointing computes again."""
    weights: bool = True
    """A rank may hold a part of each weight."""


@dataclass(frozen=True)
class LayoutSpace:
    """All that decides which layouts a training can have."""

    workload: str
    batch: int
    divisible: SplitOptions
    fp8: bool
    devices: int
    cluster: Cluster
    limits: LayoutConstraints

    def families(self) -> Iterator[LayoutFamily | RejectedFamily]:
        for pipeline, tensor in itertools.product(self._stages(), self._tensors()):
            yield from self._split(tensor, pipeline)

    def _split(self, tensor: int, pipeline: int) -> Iterator[LayoutFamily | RejectedFamily]:
        """The families in which that many ranks divide the model."""
        sides = {"tensor": tensor} if pipeline == 1 else {"tensor": tensor, "pipeline": pipeline}
        if why := self._undividable(tensor, pipeline):
            yield self._refused(sides if tensor > 1 else {"pipeline": pipeline}, "", *why)
            return
        data, left = divmod(self.devices, tensor * pipeline)
        if left or not data:
            return
        if data > self.batch:
            who, facts = f"{data} data-parallel ranks", {"batch": self.batch}
            axes, who = ({}, who) if data == self.devices else (sides, f": {who}")
            yield self._refused(axes, who, RejectReason.NO_SAMPLE, facts)
            return
        if pipeline > 1 and self.batch // data < pipeline:
            share = self.batch // data
            said = {"samples": f"{share} sample{'s' * (share > 1)}", "stages": pipeline}
            yield self._refused(sides, "", RejectReason.UNFILLED, said)
            return
        schedule = self.limits.schedule or "1f1b"
        sequence = self.limits.sequence
        if sequence is None:
            sequence = tensor > 1 and self.divisible.sequence > 0 and self.divisible.sequence % tensor == 0
        free = not self.limits.offload and self.limits.strategy is None
        for replicate, shard, strategy in self._strategies(data, tensor, pipeline):
            base = Layout(strategy, replicate, self.batch, 1, shard, tensor, pipeline, schedule, sequence)
            yield LayoutFamily(base, offloaded_only=self.cluster.devices == 1 and strategy == "fsdp" and free)

    def _refused(self, sides: dict[str, int], more: str, kind: RejectReason, facts: dict[str, Any]) -> RejectedFamily:
        name = " + ".join(f"{axis} {size}" for axis, size in sides.items()) + more
        return RejectedFamily(self.devices, name, kind, facts, parts=max(1, len(sides)), axes=tuple(sides))

    def _tensors(self) -> list[int]:
        most = min(self.devices, MAX_TENSOR) if self.divisible.splits and not self.fp8 else 1
        return _powers_of_two(most) if self.limits.tensor is None else [self.limits.tensor]

    def _stages(self) -> list[int]:
        most = min(self.devices, max(1, self.divisible.layers), MAX_STAGES)
        return _powers_of_two(most) if self.limits.pipeline is None else [self.limits.pipeline]

    def _undividable(self, tensor: int, pipeline: int) -> tuple[RejectReason, dict[str, Any]] | None:
        splits, layers = self.divisible.splits, self.divisible.layers
        if tensor > 1:
            if not splits:
                return RejectReason.NO_RULES, {"workload": self.workload}
            if self.fp8:
                return RejectReason.FP8, {}
            if tensor > self.cluster.per_node:
                return RejectReason.CROSSES_NODES, {"tensor": tensor, "per_node": self.cluster.per_node}
            if odd := [n for n in splits if n % tensor]:
                return RejectReason.INDIVISIBLE, {"tensor": tensor, "size": odd[0]}
        if pipeline > 1:
            if not layers:
                return RejectReason.NO_LAYERS, {"workload": self.workload}
            if pipeline > layers:
                return RejectReason.FEW_LAYERS, {"layers": layers, "stages": pipeline}
        return None

    def _strategies(self, data: int, tensor: int, pipeline: int) -> Iterator[tuple[int, int, str]]:
        """(replicate, shard, strategy) of the data-parallel ranks."""
        asked = self.limits.strategy
        free = SEARCHED_STRATEGIES if self.divisible.weights else UNSHARDED_STRATEGIES
        for strategy in free if asked is None else (asked,):
            if strategy == "single":
                if self.devices == 1 or (asked is not None and data == 1):
                    yield 1, 1, strategy
            elif strategy == "hsdp":
                in_node = max(1, self.cluster.per_node // tensor)
                shards = [s for s in (in_node << k for k in range(8)) if s > 1 and data % s == 0 and data // s > 1]
                yield from ((data // s, s, strategy) for s in shards[:3])
            elif strategy == "ddp":
                if self.devices > 1 or asked is not None:
                    yield data, 1, strategy if data > 1 else "single"
            elif strategy == "zero1" and tensor * pipeline > 1:
                continue
            elif data > 1 or (self.devices == 1 and (strategy == "fsdp" or asked is not None)):
                yield 1, data, strategy  # on one device only to move its states to the host


def _powers_of_two(most: int) -> list[int]:
    """Powers of two, from one."""
    return [1 << k for k in range(most.bit_length())]


def enumerate_layouts(
    family: LayoutFamily, limits: LayoutConstraints, offload: bool, recomputes: bool
) -> Iterator[list[Layout]]:
    """For each way to recompute, the layouts of a family from the largest batch of one pass to the smallest."""
    base = family.base
    if offload and base.strategy not in OFFLOADABLE_STRATEGIES:
        return
    usual = CHECKPOINTING if recomputes else CHECKPOINTING[:1]
    fixed = limits.activation_checkpointing
    for checkpointing in usual if fixed is None else (fixed,):
        kind = replace(base, checkpointing=checkpointing, offload=offload)
        yield [replace(kind, micro_batch=size) for size in _micro_batches(kind, limits)]


def _micro_batches(base: Layout, limits: LayoutConstraints) -> list[int]:
    per_rank = math.ceil(base.global_batch / base.data)
    size = max(1, per_rank // base.pipeline) if base.pipeline > 1 else per_rank
    if limits.micro_batch is not None:
        return [min(limits.micro_batch, size)]
    sizes = [size]
    while size > 1:
        size = -(-size // 2)
        sizes.append(size)
    return sizes


def layout_overrides(layout: Layout) -> dict[str, Any]:
    """A layout as the values of `parallel` that lead to it; what is as by default is left out."""
    usual = Layout("", 1, 1, 1)
    names = ["strategy", "ranks", "micro_batch", *["replicate"] * (layout.strategy == "hsdp")]
    axes = ("tensor", "pipeline", "sequence", "checkpointing", "offload")
    names += [name for name in axes if getattr(layout, name) != getattr(usual, name)]
    names += ["schedule"] * (layout.pipeline > 1)
    keys = {"checkpointing": "activation_checkpointing"}
    return {f"parallel.{keys.get(name, name)}": getattr(layout, name) for name in names}
