"""Time of one optimiser step, by term: passes, collectives, bubble, update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.planning.comm import all_gather_s, all_reduce_s, exposed_s, group, send_s
from paceline.planning.compute import block_pass, optimizer_s
from paceline.planning.hardware import Cluster
from paceline.planning.physics import Physics
from paceline.planning.shape import Block
from paceline.planning.spread import Numbers, Spread

BUCKET_BYTES = 25e6
"""Size in which gradients are sent while the backward pass goes on."""

BACKWARD_SHARE = 2 / 3
"""Of the time of a pass, beside which gradients can travel."""


@dataclass(frozen=True)
class StepTime:
    """The terms of one step; `compute_s + exposed_s + bubble_s + update_s + overhead_s + waiting_s = step_s`."""

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

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.update_s + self.overhead_s + self.waiting_s


def step_time(
    blocks: tuple[Block, ...], spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics
) -> StepTime:
    """Price one optimiser step of a model (its blocks: first, repeated, last) under a layout on a cluster."""
    device = cluster.device
    pp, t, cp, m = spread.pipeline, spread.tensor, spread.context, spread.accumulate
    passes = {b.name: block_pass(b, spread, device, numbers, physics) for b in blocks}
    layers = max(blocks, key=lambda b: b.repeat)
    ends = [b for b in blocks if b is not layers]

    # one micro-batch on the slowest stage: its layers, and the head where that adds to the last stage
    per_stage = math.ceil(layers.repeat / pp)
    layer_s = passes[layers.name].total_s
    ends_s = sum(passes[b.name].total_s for b in ends)
    tensor = _tensor_s(layers, spread, cluster, numbers, physics, layer_s)
    context = _context_s(layers, spread, cluster, numbers, physics, layer_s)
    stage_compute_s = per_stage * layer_s + (ends_s if pp == 1 else max(passes[b.name].total_s for b in ends))
    stage_flight_s = per_stage * (tensor[0] + context[0])
    stage_exposed_s = per_stage * (tensor[1] + context[1])
    if pp > 1:
        edge = spread.micro_batch * layers.edge_elements / cp * numbers.element_bytes / t
        stride = t * cp * spread.data
        sends = 2 * spread.chunks * send_s(edge, stride, cluster, physics)
        stage_flight_s += sends
        stage_exposed_s += exposed_s(sends, stage_compute_s, physics, spread.overlap)

    # weights gathered and gradients scattered in every pass (zero 3), or gradients reduced once a step
    local_params = sum(b.repeat * b.params for b in blocks) / (t * pp)
    forward_s = per_stage * passes[layers.name].forward_s + passes[ends[-1].name].forward_s
    backward_s = stage_compute_s - forward_s
    shards = group(spread.shard, t * cp, cluster, physics)
    copies = group(spread.replicate, t * cp * spread.shard, cluster, physics)
    everyone = group(spread.data * cp, t, cluster, physics)
    each_comm = each_exposed = once_comm = once_exposed = 0.0
    collectives = layers.repeat / pp + 2
    if spread.zero == 3:
        gather = all_gather_s(local_params * numbers.gathered_bytes, shards, physics, collectives)
        scatter = all_gather_s(local_params * numbers.sent_bytes, shards, physics, collectives)
        each_comm = 2 * gather + scatter
        each_exposed = exposed_s(gather, forward_s, physics, spread.overlap)
        each_exposed += exposed_s(gather + scatter, backward_s, physics, spread.overlap)
        if spread.replicate > 1:
            once_comm = all_reduce_s(local_params / spread.shard * numbers.sent_bytes, copies, physics, collectives)
            once_exposed = exposed_s(once_comm, backward_s, physics, spread.overlap)
    elif spread.data * cp > 1:
        sent = local_params * numbers.sent_bytes
        calls = max(1.0, sent / BUCKET_BYTES) if spread.overlap else 1.0
        once_comm = all_reduce_s(sent, everyone, physics, calls)
        once_exposed = exposed_s(once_comm, backward_s, physics, spread.overlap)
    owned = local_params / (spread.shard if spread.zero else 1)
    update_s = optimizer_s(owned, device, numbers, physics)

    host_s = (per_stage + len(ends)) * physics.update_launches * physics.launch_s

    pass_s = stage_compute_s + stage_exposed_s + each_exposed
    whole_s = (layers.repeat * layer_s + ends_s) / pp + stage_exposed_s
    bubble_s = (pp - 1) * whole_s / spread.chunks
    exposed = m * (stage_exposed_s + each_exposed) + once_exposed
    busy = m * pass_s + bubble_s + once_exposed
    return StepTime(
        compute_s=m * stage_compute_s,
        comm_s=m * (stage_flight_s + each_comm) + once_comm,
        exposed_s=exposed,
        bubble_s=bubble_s,
        update_s=update_s,
        overhead_s=0.0 if spread.graphed else host_s,
        waiting_s=physics.jitter * math.log2(spread.ranks) * busy,
    )


def _tensor_s(
    layer: Block, spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics, beside_s: float
) -> tuple[float, float]:
    """Sums of partial results, two per layer forward and two backward, and again where the layer is recomputed.

    With sequence parallelism they are gathers and scatters that run in pieces beside the products they feed.
    """
    if spread.tensor == 1:
        return 0.0, 0.0
    sent = spread.micro_batch * layer.edge_elements / spread.context * numbers.element_bytes
    sums = 6 if spread.recompute == "full" else 4
    total = sums * all_reduce_s(sent, group(spread.tensor, 1, cluster, physics), physics)
    return total, exposed_s(total, beside_s, physics, spread.overlap and spread.sequence_parallel)


def _context_s(
    layer: Block, spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics, beside_s: float
) -> tuple[float, float]:
    """Keys and values passed around the ring of a sequence's parts: in flight, and exposed."""
    if spread.context == 1 or layer.attention is None:
        return 0.0, 0.0
    attention = layer.attention
    width = 2 * attention.kv_heads * attention.head_width * attention.length
    sent = spread.micro_batch * width * numbers.element_bytes / spread.tensor
    total = 3 * all_gather_s(sent, group(spread.context, spread.tensor, cluster, physics), physics)
    return total, exposed_s(total, beside_s, physics)


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
    visible_s = exposed_s(comm_s, BACKWARD_SHARE * alone_s / accumulate, physics)
    return (alone_s + visible_s) * (1 + physics.jitter * math.log2(ranks))
