"""Enumerate the layouts that a training could have on a number of devices, and say why others are impossible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.config import DEFAULT, RunSpec
from paceline.hardware.catalogue import Cluster
from paceline.layout import ZERO_STAGES, Layout
from paceline.planner.candidates import RejectedFamily, RejectReason

SEARCHED_STRATEGIES = tuple(strategy for strategy in ZERO_STAGES if strategy != "zero3")
UNSHARDED_STRATEGIES = tuple(strategy for strategy in SEARCHED_STRATEGIES if ZERO_STAGES[strategy] < 2)
"""Those under which every rank holds all weights and gradients."""
CHECKPOINTING = ("none", "selective", "full")
MAX_TENSOR = 16
MAX_STAGES = 64


@dataclass(frozen=True)
class LayoutConstraints:
    """Values of `parallel` that the run file fixes; None leaves a value to the search."""

    strategy: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    sequence: bool | None = None
    micro_batch: int | None = None
    activation_checkpointing: str | None = None
    offload: bool | None = None
    written: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """The same as the run file has them."""

    def describe(self) -> str:
        return " ".join(f"parallel.{name}={str(value).lower()}" for name, value in self.written)


def constraints_of(spec: RunSpec) -> LayoutConstraints:
    """Return the fields of `parallel` that were written down; `auto` leaves all of them to the search."""
    parallel = spec.parallel
    defaults = type(parallel)()
    given = {}
    for name in (one.name for one in fields(LayoutConstraints) if one.name != "written"):
        value = getattr(parallel, name)
        written = spec.origin(f"parallel.{name}") != DEFAULT or value != getattr(defaults, name)
        if written and value not in (None, "auto"):
            given[name] = value
    as_written = tuple(given.items())
    if given.get("strategy") == "zero3":
        given["strategy"] = "fsdp"
    if parallel.reduce != "exact":  # for data parallelism alone
        given = {"strategy": "ddp", "tensor": 1, "pipeline": 1, **given}
        as_written = (*as_written, ("reduce", parallel.reduce))
    return LayoutConstraints(**given, written=as_written)


@dataclass(frozen=True)
class SplitOptions:
    """What of a model can be divided among ranks besides its samples."""

    splits: tuple[int, ...] = ()
    """Sizes that the ranks of `tensor` must divide; empty if the model cannot be divided."""
    sequence: int = 0
    """Positions that the ranks of `tensor` may divide among them; 0 if they cannot."""
    layers: int = 0
    """Layers that a pipeline can divide; 0 if it cannot."""
    recomputes: bool = True
    """Has repeated layers, which activation checkpointing recomputes."""
    weights: bool = True
    """A rank may hold a part of each weight."""


@dataclass(frozen=True)
class LayoutSpace:
    """The layouts that a training can have."""

    workload: str
    batch: int
    splits: SplitOptions
    fp8: bool
    devices: int
    cluster: Cluster
    constraints: LayoutConstraints

    def families(self) -> Iterator[Layout | RejectedFamily]:
        """One layout of each family. An offloaded one stands for a family that only makes sense offloaded."""
        for pipeline, tensor in itertools.product(self._stages(), self._tensors()):
            yield from self._split(tensor, pipeline)

    def _split(self, tensor: int, pipeline: int) -> Iterator[Layout | RejectedFamily]:
        """The families in which that many ranks divide the model."""
        sides = {"tensor": tensor} if pipeline == 1 else {"tensor": tensor, "pipeline": pipeline}
        if obstacle := self._find_obstacle(tensor, pipeline):
            yield self._reject(sides if tensor > 1 else {"pipeline": pipeline}, "", *obstacle)
            return
        data, left = divmod(self.devices, tensor * pipeline)
        if left or not data:
            return
        if data > self.batch:
            who, facts = f"{data} data-parallel ranks", {"batch": self.batch}
            axes, who = ({}, who) if data == self.devices else (sides, f": {who}")
            yield self._reject(axes, who, RejectReason.NO_SAMPLE, facts)
            return
        if pipeline > 1 and self.batch // data < pipeline:
            share = self.batch // data
            samples = f"{share} sample{'s' * (share > 1)}"
            yield self._reject(sides, "", RejectReason.UNFILLED, {"samples": samples, "stages": pipeline})
            return
        schedule = self.constraints.schedule or "1f1b"
        sequence = self.constraints.sequence
        if sequence is None:
            sequence = tensor > 1 and self.splits.sequence > 0 and self.splits.sequence % tensor == 0
        free = not self.constraints.offload and self.constraints.strategy is None
        for replicate, shard, strategy in self._strategies(data, tensor, pipeline):
            offload_only = self.cluster.devices == 1 and strategy == "fsdp" and free
            shape = (replicate, self.batch, 1, shard, tensor, pipeline, schedule, sequence)
            yield Layout(strategy, *shape, offload=offload_only)

    def _reject(self, sides: dict[str, int], more: str, code: RejectReason, facts: dict[str, Any]) -> RejectedFamily:
        name = " + ".join(f"{axis} {size}" for axis, size in sides.items()) + more
        return RejectedFamily(self.devices, name, code, facts, parts=max(1, len(sides)), axes=tuple(sides))

    def _tensors(self) -> list[int]:
        most = min(self.devices, MAX_TENSOR) if self.splits.splits and not self.fp8 else 1
        return _powers_of_two(most) if self.constraints.tensor is None else [self.constraints.tensor]

    def _stages(self) -> list[int]:
        most = min(self.devices, max(1, self.splits.layers), MAX_STAGES)
        return _powers_of_two(most) if self.constraints.pipeline is None else [self.constraints.pipeline]

    def _find_obstacle(self, tensor: int, pipeline: int) -> tuple[RejectReason, dict[str, Any]] | None:
        splits, layers = self.splits.splits, self.splits.layers
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
        fixed = self.constraints.strategy
        free = SEARCHED_STRATEGIES if self.splits.weights else UNSHARDED_STRATEGIES
        for strategy in free if fixed is None else (fixed,):
            if strategy == "single":
                if self.devices == 1 or (fixed is not None and data == 1):
                    yield 1, 1, strategy
            elif strategy == "hsdp":
                in_node = max(1, self.cluster.per_node // tensor)
                shards = [s for s in (in_node << k for k in range(8)) if s > 1 and data % s == 0 and data // s > 1]
                yield from ((data // s, s, strategy) for s in shards[:3])
            elif strategy == "ddp":
                if self.devices > 1 or fixed is not None:
                    yield data, 1, strategy if data > 1 else "single"
            elif strategy == "zero1" and tensor * pipeline > 1:
                continue
            elif data > 1 or (self.devices == 1 and (strategy == "fsdp" or fixed is not None)):
                yield 1, data, strategy  # on one device only to move its states to the host


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]


def enumerate_layouts(
    family: Layout, constraints: LayoutConstraints, offload: bool, recomputes: bool
) -> Iterator[list[Layout]]:
    """Yield, for each way to recompute, the layouts of a family from the largest micro-batch to the smallest."""
    if offload and ZERO_STAGES[family.strategy] < 2:
        return
    usual = CHECKPOINTING if recomputes else CHECKPOINTING[:1]
    fixed = constraints.activation_checkpointing
    for checkpointing in usual if fixed is None else (fixed,):
        kind = replace(family, checkpointing=checkpointing, offload=offload)
        yield [replace(kind, micro_batch=size) for size in _micro_batches(kind, constraints)]


def _micro_batches(layout: Layout, constraints: LayoutConstraints) -> list[int]:
    per_rank = math.ceil(layout.global_batch / layout.data)
    size = max(1, per_rank // layout.pipeline) if layout.pipeline > 1 else per_rank
    if constraints.micro_batch is not None:
        return [min(constraints.micro_batch, size)]
    sizes = [size]
    while size > 1:
        size = -(-size // 2)
        sizes.append(size)
    return sizes


def layout_overrides(layout: Layout) -> dict[str, Any]:
    """Return the values of `parallel` that lead to a layout, without those that are the default."""
    usual = Layout("", 1, 1, 1)
    names = ["strategy", "ranks", "micro_batch", *["replicate"] * (layout.strategy == "hsdp")]
    axes = ("tensor", "pipeline", "sequence", "checkpointing", "offload")
    names += [name for name in axes if getattr(layout, name) != getattr(usual, name)]
    names += ["schedule"] * (layout.pipeline > 1)
    keys = {"checkpointing": "activation_checkpointing"}
    return {f"parallel.{keys.get(name, name)}": getattr(layout, name) for name in names}
