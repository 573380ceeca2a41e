"""Memory of the fullest device, by term."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.planning.formulas.physics import Physics
from paceline.planning.formulas.shape import Block
from paceline.planning.formulas.spread import Numbers, Spread

SCORE_COPIES = 2.5
"""Stored scores: normalised, dropped, and the mask that dropped them in half an element."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device at the peak of a step, and what was moved to the host."""

    weights_bytes: float
    gradients_bytes: float
    states_bytes: float
    activations_bytes: float
    logits_bytes: float
    gathered_bytes: float
    """Whole weights and gradients of the layers at work, where they are kept in shards."""
    buffers_bytes: float
    lost_bytes: float
    """Room between allocations that none fits into."""
    context_bytes: float
    """Driver, libraries and the collectives' own buffers: outside the framework's allocator."""
    host_bytes: float = 0.0

    @property
    def allocated_bytes(self) -> float:
        """What the framework's allocator hands out at the peak: the number that torch reports."""
        return self.total_bytes - self.context_bytes - self.lost_bytes

    @property
    def total_bytes(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self) if f.name != "host_bytes"))


def memory(blocks: tuple[Block, ...], spread: Spread, numbers: Numbers, physics: Physics) -> Memory:
    """Price a model (its blocks: first, repeated, last) under a layout; the first or last stage is the fullest."""
    embedding, layer, head = blocks[0], max(blocks, key=lambda b: b.repeat), blocks[-1]
    pp, t = spread.pipeline, spread.tensor
    layers_here = layer.repeat / pp
    ends = embedding.params + head.params
    params = (layers_here * layer.params + (ends if pp == 1 else max(embedding.params, head.params))) / t
    cut = [spread.shard if spread.zero >= level else 1 for level in (1, 2, 3)]
    weights = params * numbers.weight_bytes / cut[2]
    gradients = params * numbers.gradient_bytes / cut[1]
    states = params * numbers.state_bytes / cut[0]
    host = 0.0
    if spread.offload:
        host, states, gradients = states + gradients, 0.0, 0.0  # gradients leave as they are made
    if spread.offload_weights:
        host, weights = host + weights, 0.0

    samples = spread.micro_batch / spread.context
    in_flight = 1.0
    if pp > 1:
        in_flight = min(pp * (1 + (pp - 1) / (pp * spread.chunks) if spread.chunks > 1 else 1), spread.accumulate)
        if spread.schedule == "gpipe":  # all passes forward, then all backward
            in_flight = spread.accumulate
    e = numbers.element_bytes
    whole_cut = t if spread.sequence_parallel else 1
    edge = layer.edge_elements / (t if spread.sequence_parallel else 1)
    full = layer.saved_split_elements / t + layer.saved_whole_elements / whole_cut
    full += layer.eager_saved_elements / whole_cut if spread.kernels != "compiled" else 0.0
    if spread.recompute == "selective" and layer.attention is not None:
        if layer.attention.fused:  # the attention output and every second product are kept
            products = sum(m.rows * m.outer / (t if m.split == "outer" else whole_cut) for m in layer.matmuls)
            full = edge + layer.edge_elements / t + products / 2
        else:
            full -= SCORE_COPIES * layer.attention.score_elements / t
    # full recomputation keeps what enters each layer, and all of the one layer at work
    kept = layers_here * in_flight * (edge if spread.recompute == "full" else full)
    kept += full if spread.recompute == "full" else 0.0
    activations = samples * e * (kept + head.saved_whole_elements + embedding.saved_whole_elements)
    logits = _logits(head, samples, spread, numbers)
    gathered = _gathered(embedding, layer, head, params, spread, numbers)
    buffers = physics.bucket_bytes if spread.zero in (1, 2) else 0.0
    lost = physics.fragmentation * (activations + logits)
    if spread.fresh_gradients:  # whichever is more, at the end of the forward or of the backward pass
        gradients = max(0.0, gradients + samples * e * full - activations - logits)
    axes = (spread.data, t, pp, spread.context)
    context = physics.context_bytes + physics.communicator_bytes * sum(size > 1 for size in axes)
    return Memory(weights, gradients, states, activations, logits, gathered, buffers, lost, context, host)


def _logits(head: Block, samples: float, spread: Spread, numbers: Numbers) -> float:
    """Logits in the type of the products, and in fp32 with their gradient while the loss is computed.

    One kernel for the whole loss works in the memory of the logits. The gradient of its weights is there twice while
    another chunk is added to it.
    """
    alone = head.loss_params > 0 and spread.kernels == "compiled" and spread.tensor == 1
    each = numbers.element_bytes + (0.0 if alone else 8.0)
    chunk = min(samples * head.saved_split_elements / spread.tensor, head.most_logits)
    copies = 2 if spread.fresh_gradients else 1
    return chunk * each + copies * head.loss_params / spread.tensor * numbers.weight_bytes


def _gathered(embedding: Block, layer: Block, head: Block, params: float, spread: Spread, numbers: Numbers) -> float:
    """Whole weights of the layers at work, and copies of weights in the type of the products."""
    t, e = spread.tensor, numbers.element_bytes
    if spread.zero == 3:
        largest = max(layer.params, embedding.params) / t
        gathered = 2 * layer.params / t * numbers.gathered_bytes + largest * numbers.sent_bytes
        gathered += params * e if spread.keeps_casts and numbers.cast else 0.0
        ends = embedding.params + head.params
        return gathered + (ends / t * (numbers.weight_bytes + e) if spread.keeps_ends else 0.0)
    if not numbers.cast:
        return 0.0
    if spread.kernels == "compiled" and spread.recompute == "full":  # cast again with the layer
        return (layer.params + head.loss_params) / t * e
    return params * e
