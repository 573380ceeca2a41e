"""Time of one optimiser step, by term: passes, collectives, bubble, update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.hardware.catalogue import Cluster
from paceline.planning.formulas.comm import all_gather_s, all_reduce_s, exposed_s, group, send_s
from paceline.planning.formulas.compute import block_pass, optimizer_s
from paceline.planning.formulas.offload import offload
from paceline.planning.formulas.physics import Physics
from paceline.planning.formulas.shape import Block
from paceline.planning.formulas.spread import Numbers, Spread

BUCKET_BYTES = 25e6
"""Size in which gradients are sent while the backward pass goes on."""

BACKWARD_SHARE = 2 / 3
"""Of the time of a pass, beside which gradients can travel."""

ZERO_BUBBLE = 1 / 3
"""Of a bubble, where gradients of weights are put off to fill it: of forward, backward and weights, one remains."""
FUSED_UPDATE_KERNELS = 60
"""Launched to sum up, clip and update, where one kernel takes many tensors."""
POWER_RANK = 4
"""Columns of the two thin matrices that PowerSGD sends for each weight matrix."""


@dataclass(frozen=True)
class StepTime:
    """The terms of one step. All but `comm_s` add up to `step_s`."""

    compute_s: float
    """Forward, backward and recomputation of all micro-batches on the slowest stage."""
    comm_s: float
    """Time that collectives are in flight."""
    exposed_s: float
    """Communication that nothing hides."""
    bubble_s: float
    """A stage waiting for the first micro-batch to come and the last to go."""
    update_s: float
    overhead_s: float
    waiting_s: float
    """For the slowest of the ranks."""
    offload_s: float = 0.0
    """Shards on their way between host and device that nothing hides, and the update by the host."""
    data_s: float = 0.0
    """Waiting for input."""

    @property
    def step_s(self) -> float:
        work = self.compute_s + self.exposed_s + self.bubble_s + self.update_s + self.overhead_s + self.waiting_s
        return work + self.offload_s + self.data_s


def step_time(
    blocks: tuple[Block, ...], spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics
) -> StepTime:
    """Price one optimiser step of a model (its blocks: first, repeated, last) under a layout on a cluster."""
    stages, passes = spread.pipeline, spread.accumulate
    stage = _stage(blocks, spread, cluster, numbers, physics)
    local_params = sum(b.repeat * b.params for b in blocks) / (spread.tensor * stages)
    collectives = max(b.repeat for b in blocks) / stages + 2
    each, once = _data_s(blocks, local_params, collectives, stage, spread, cluster, numbers, physics)

    bubble_s = (stages - 1) * (stage.mean_compute_s + stage.exposed_s) / spread.chunks
    bubble_s *= ZERO_BUBBLE if spread.schedule == "zero_bubble" else 1.0
    exposed = passes * (stage.exposed_s + each.exposed_s) + once.exposed_s
    busy_s = passes * stage.compute_s + exposed + bubble_s
    owned = local_params / (spread.shard if spread.zero else 1)
    moved = offload(owned, spread, cluster, numbers, physics)
    return StepTime(
        compute_s=passes * stage.compute_s,
        comm_s=passes * (stage.flight_s + each.flight_s) + once.flight_s,
        exposed_s=exposed,
        bubble_s=bubble_s,
        update_s=0.0 if spread.offload else optimizer_s(owned, cluster.device, numbers, physics),
        overhead_s=_update_starts_s(collectives, spread, physics),
        waiting_s=physics.jitter * math.log2(spread.ranks) * busy_s,
        offload_s=passes * exposed_s(moved.bus_s, stage.compute_s, physics, spread.overlap) + moved.update_s,
    )


def _update_starts_s(layers: float, spread: Spread, physics: Physics) -> float:
    """Of the update's kernels: launched by the host or, where steps are compiled, ahead of the device."""
    if spread.kernels == "compiled":
        return FUSED_UPDATE_KERNELS * physics.kernel_s
    return (FUSED_UPDATE_KERNELS if spread.fused_update else layers * physics.update_launches) * physics.launch_s


@dataclass(frozen=True)
class _Travel:
    """Communication: in flight, and visible."""

    flight_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True)
class _Stage:
    """One micro-batch on the slowest stage of a pipeline, or on the whole model where there is none."""

    forward_s: float
    compute_s: float
    mean_compute_s: float
    """Of all stages, which fill and drain the pipeline."""
    flight_s: float
    exposed_s: float


def _stage(blocks: tuple[Block, ...], spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics) -> _Stage:
    stages = spread.pipeline
    layer = max(blocks, key=lambda b: b.repeat)
    each = block_pass(layer, spread, cluster.device, numbers, physics)
    ends = [block_pass(b, spread, cluster.device, numbers, physics) for b in blocks if b is not layer]
    here = math.ceil(layer.repeat / stages)
    # the embedding is on the first stage and the head on the last: the slower of them is added to one stage
    added = ends if stages == 1 else [max(ends, key=lambda p: p.total_s)]
    compute_s = here * each.total_s + sum(p.total_s for p in added)
    travels = [
        _tensor_s(layer, spread, cluster, numbers, physics, each.total_s),
        _context_s(layer, spread, cluster, numbers, physics, each.total_s),
    ]
    flight_s = here * sum(t.flight_s for t in travels)
    visible_s = here * sum(t.exposed_s for t in travels)
    if stages > 1:
        edge = spread.micro_batch * layer.edge_elements / spread.context * numbers.element_bytes / spread.tensor
        stride = spread.tensor * spread.context * spread.data
        sends_s = 2 * spread.chunks * send_s(edge, stride, cluster, physics)
        flight_s += sends_s
        visible_s += exposed_s(sends_s, compute_s, physics, spread.overlap)
    return _Stage(
        forward_s=here * each.forward_s + sum(p.forward_s for p in added),
        compute_s=compute_s,
        mean_compute_s=(layer.repeat * each.total_s + sum(p.total_s for p in ends)) / stages,
        flight_s=flight_s,
        exposed_s=visible_s,
    )


def _data_s(
    blocks: tuple[Block, ...],
    local_params: float,
    collectives: float,
    stage: _Stage,
    spread: Spread,
    cluster: Cluster,
    numbers: Numbers,
    physics: Physics,
) -> tuple[_Travel, _Travel]:
    """Weights and gradients between the groups that see different samples: in each pass, and once a step."""
    inner = spread.tensor * spread.context
    backward_s = stage.compute_s - stage.forward_s
    if spread.zero == 3:
        shards = group(spread.shard, inner, cluster, physics)
        gather = all_gather_s(local_params * numbers.gathered_bytes, shards, physics, collectives)
        scatter = all_gather_s(local_params * numbers.sent_bytes, shards, physics, collectives)
        visible = exposed_s(gather, stage.forward_s, physics, spread.overlap)
        visible += exposed_s(gather + scatter, backward_s, physics, spread.overlap)
        each = _Travel(2 * gather + scatter, visible)
        copies = group(spread.replicate, inner * spread.shard, cluster, physics)
        flight = all_reduce_s(local_params / spread.shard * numbers.sent_bytes, copies, physics, collectives)
        return each, _Travel(flight, exposed_s(flight, backward_s, physics, spread.overlap))
    # sharded optimiser states scatter gradients and gather weights: together the bytes of an all-reduce
    everyone = group(spread.data * spread.context, spread.tensor, cluster, physics)
    sent = local_params * numbers.sent_bytes
    if spread.reduce in ("local_sgd", "diloco"):  # weights are averaged after a step, now and then
        flight = all_reduce_s(local_params * numbers.weight_bytes, everyone, physics) / spread.local_steps
        return _Travel(), _Travel(flight, flight)
    if spread.reduce in ("bf16", "fp16"):
        sent = local_params * 2.0
    elif spread.reduce == "powersgd":
        sent = sum(b.repeat * _thin_elements(b) for b in blocks) * numbers.sent_bytes
    calls = max(1.0, sent / BUCKET_BYTES) if spread.overlap else 1.0
    flight = all_reduce_s(sent, everyone, physics, calls)
    return _Travel(), _Travel(flight, _in_buckets_s(flight, sent, backward_s, physics, spread.overlap))


def _in_buckets_s(comm_s: float, sent: float, beside_s: float, physics: Physics, overlap: bool = True) -> float:
    """What remains visible of gradients sent in buckets: the last is full when the backward pass is over."""
    last = comm_s / max(1.0, sent / BUCKET_BYTES)
    return last + exposed_s(comm_s - last, beside_s, physics, overlap)


def _thin_elements(block: Block) -> float:
    """What PowerSGD sends of a block: two thin matrices per product, and what is no matrix as it is."""
    if not block.matmuls:
        return block.params / max(1.0, math.sqrt(block.params) / (2 * POWER_RANK))
    whole = sum(m.inner * m.outer for m in block.matmuls)
    return POWER_RANK * sum(m.inner + m.outer for m in block.matmuls) + max(0.0, block.params - whole)


def _tensor_s(
    layer: Block, spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics, beside_s: float
) -> _Travel:
    """Sums of partial results, two per layer forward and two backward, and again where the layer is recomputed.

    With sequence parallelism they are gathers and scatters that run in pieces beside the products they feed.
    """
    if spread.tensor == 1:
        return _Travel()
    sent = spread.micro_batch * layer.edge_elements / spread.context * numbers.element_bytes
    sums = 6 if spread.recompute == "full" else 4
    total = sums * all_reduce_s(sent, group(spread.tensor, 1, cluster, physics), physics)
    return _Travel(total, exposed_s(total, beside_s, physics, spread.overlap and spread.sequence_parallel))


def _context_s(
    layer: Block, spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics, beside_s: float
) -> _Travel:
    """Keys and values passed around the ring of a sequence's parts: in flight, and exposed."""
    if spread.context == 1 or layer.attention is None:
        return _Travel()
    attention = layer.attention
    width = 2 * attention.kv_heads * attention.head_width * attention.length
    sent = spread.micro_batch * width * numbers.element_bytes / spread.tensor
    total = 3 * all_gather_s(sent, group(spread.context, spread.tensor, cluster, physics), physics)
    return _Travel(total, exposed_s(total, beside_s, physics))


def data_parallel_step_s(
    alone_s: float, params: float, ranks: int, cluster: Cluster, numbers: Numbers, physics: Physics, accumulate: int = 1
) -> float:
    """A step of `ranks` devices that each do what one device does alone in `alone_s`, and average their gradients.

    Needs no shape: the way to price a workload that was measured on one device.
    """
    if ranks == 1:
        return alone_s
    sent = params * numbers.sent_bytes
    comm_s = all_reduce_s(sent, group(ranks, 1, cluster, physics), physics, max(1.0, sent / BUCKET_BYTES))
    visible_s = _in_buckets_s(comm_s, sent, BACKWARD_SHARE * alone_s / accumulate, physics)
    return (alone_s + visible_s) * (1 + physics.jitter * math.log2(ranks))
