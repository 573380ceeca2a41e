"""Every layout that a run could have on a number of devices, and why the others cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.hardware.catalogue import Cluster
from paceline.layout import Layout
from paceline.planning.subject import Subject
from paceline.spec import DEFAULT, RunSpec

STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2")
"""In the order in which people try them. zero3 is fsdp by another name."""
CHECKPOINTING = ("none", "selective", "full")
MOST_TENSOR = 16
MOST_STAGES = 64
OFFLOADABLE = ("zero2", "fsdp", "hsdp")


@dataclass(frozen=True)
class Limits:
    """What the run file insists on; None leaves it to the search."""

    strategy: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    sequence: bool | None = None
    micro_batch: int | None = None
    checkpointing: str | None = None
    offload: bool | None = None

    def words(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"parallel.{name}={str(value).lower()}" for name, value in given.items())


def limits_of(spec: RunSpec) -> Limits:
    """The fields of `parallel` that were written down; `auto` leaves all of them to the search."""
    parallel = spec.parallel
    usual = type(parallel)()
    given = {}
    for name in vars(Limits()):
        value = getattr(parallel, name)
        written = spec.origin(f"parallel.{name}") != DEFAULT or value != getattr(usual, name)
        if written and value not in (None, "auto"):
            given[name] = value
    if given.get("strategy") == "zero3":
        given["strategy"] = "fsdp"
    if parallel.reduce != "exact":  # for plain data parallelism alone
        given = {"strategy": "ddp", "tensor": 1, "pipeline": 1, **given}
    return Limits(**given)


@dataclass(frozen=True)
class Refused:
    """A family of layouts that cannot be, and why."""

    devices: int
    family: str
    reason: str
    over_bytes: float = 0.0


@dataclass(frozen=True)
class Family:
    """Layouts that differ in batch, recomputation and offload alone."""

    base: Layout

    @property
    def name(self) -> str:
        return family_name(self.base)


def family_name(layout: Layout) -> str:
    parts = [layout.strategy]
    if layout.strategy == "hsdp":
        parts[0] += f" {layout.replicate}×{layout.shard}"
    parts += [f"{axis} {size}" for axis in ("tensor", "pipeline") if (size := getattr(layout, axis)) > 1]
    return " + ".join(parts[1:] if layout.strategy == "single" and len(parts) > 1 else parts)


def families(subject: Subject, devices: int, where: Cluster, limits: Limits) -> Iterator[Family | Refused]:
    """The families of layouts on that many devices, possible and not."""
    batch = subject.global_batch
    for pipeline in _stages(subject, devices, limits):
        for tensor in _tensors(subject, devices, limits):
            name = f"tensor {tensor}" if pipeline == 1 else f"tensor {tensor} + pipeline {pipeline}"
            if reason := _undividable(subject, tensor, pipeline, where):
                yield Refused(devices, name if tensor > 1 else f"pipeline {pipeline}", reason)
                continue
            data, left = divmod(devices, tensor * pipeline)
            if left or not data:
                continue
            if data > batch:
                who = f"{data} data-parallel ranks" if data == devices else f"{name}: {data} data-parallel ranks"
                yield Refused(devices, who, f"batch {batch} leaves some without a sample")
                continue
            if pipeline > 1 and batch // data < pipeline:
                yield Refused(devices, name, f"{batch // data} samples per rank do not fill {pipeline} stages")
                continue
            if subject.counts is not None:
                yield Family(documents_spread(batch, devices))
                continue
            for replicate, shard, strategy in _strategies(devices, data, tensor, pipeline, where, limits):
                able = tensor > 1 and subject.sequence > 0 and subject.sequence % tensor == 0
                sequence = able if limits.sequence is None else limits.sequence
                yield Family(
                    Layout(strategy, replicate, batch, 1, shard, tensor, pipeline, limits.schedule or "1f1b", sequence)
                )


def documents_spread(documents: int, ranks: int) -> Layout:
    """The one layout of a topic model: a rank has the next part of the documents, and passes over it whole."""
    return Layout("ddp" if ranks > 1 else "single", ranks, documents, -(-documents // ranks))


def _tensors(subject: Subject, devices: int, limits: Limits) -> list[int]:
    if limits.tensor is not None:
        return [limits.tensor]
    if not subject.splits or subject.numbers.matmul == "fp8":
        return [1]
    return [n for n in _powers(MOST_TENSOR) if n <= devices]


def _stages(subject: Subject, devices: int, limits: Limits) -> list[int]:
    if limits.pipeline is not None:
        return [limits.pipeline]
    if not subject.layers:
        return [1]
    return [n for n in _powers(MOST_STAGES) if n <= min(devices, subject.layers)]


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]


def _undividable(subject: Subject, tensor: int, pipeline: int, where: Cluster) -> str:
    if tensor > 1:
        if not subject.splits:
            return f"{subject.workload} has no rules to divide its layers"
        if subject.numbers.matmul == "fp8":
            return "fp8 scales whole matrices"
        if tensor > where.per_node:
            return f"tensor {tensor} crosses nodes of {where.per_node}"
        odd = [n for n in subject.splits if n % tensor]
        if odd:
            return f"{tensor} does not divide {odd[0]} heads or features"
    if pipeline > 1:
        if not subject.layers:
            return f"{subject.workload} has no layers to divide among stages"
        if pipeline > subject.layers:
            return f"{subject.layers} layers are fewer than {pipeline} stages"
    return ""


def _strategies(
    devices: int, data: int, tensor: int, pipeline: int, where: Cluster, limits: Limits
) -> Iterator[tuple[int, int, str]]:
    """(replicate, shard, strategy) of the data-parallel ranks."""
    beside = tensor * pipeline > 1
    for strategy in STRATEGIES if limits.strategy is None else (limits.strategy,):
        if strategy == "single":
            if devices == 1:
                yield 1, 1, strategy
        elif strategy == "hsdp":
            in_node = max(1, where.per_node // tensor)
            shards = [s for s in (in_node << k for k in range(8)) if s > 1 and data % s == 0 and data // s > 1]
            yield from ((data // s, s, strategy) for s in shards[:3])
        elif strategy == "zero1" and beside:
            continue
        elif devices == 1:
            if strategy == "ddp" and limits.strategy is not None:
                yield 1, 1, "single"
            elif strategy == "fsdp" or limits.strategy is not None:  # one device: only to move its states to the host
                yield 1, 1, strategy
        elif data == 1 and strategy != "ddp":
            continue  # nothing to divide among one rank
        elif strategy == "ddp":
            yield data, 1, strategy if data > 1 else "single"
        else:
            yield 1, data, strategy


def members(subject: Subject, family: Family, limits: Limits, offload: bool) -> Iterator[list[Layout]]:
    """For each way to recompute, the layouts of a family from the largest batch of one pass to the smallest."""
    base = family.base
    if subject.counts is not None:
        yield from [] if offload else [[base]]
        return
    if offload and base.strategy not in OFFLOADABLE:
        return
    ways = CHECKPOINTING if subject.recomputes else CHECKPOINTING[:1]
    for checkpointing in ways if limits.checkpointing is None else (limits.checkpointing,):
        kind = replace(base, checkpointing=checkpointing, offload=offload)
        yield [replace(kind, micro_batch=micro) for micro in _micro_batches(kind, limits)]


def _micro_batches(base: Layout, limits: Limits) -> list[int]:
    per_rank = math.ceil(base.global_batch / base.data)
    largest = max(1, per_rank // base.pipeline) if base.pipeline > 1 else per_rank
    if limits.micro_batch is not None:
        return [min(limits.micro_batch, largest)]
    sizes = []
    size = largest
    while size >= 1:
        sizes.append(size)
        size = -(-size // 2) if size > 1 else 0
    return sizes
