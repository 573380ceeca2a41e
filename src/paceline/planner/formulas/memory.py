"""Memory of the fullest device, by term."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.hardware.catalogue import Device
from paceline.planner.formulas.placement import DtypeSizes, Physics, Placement, read_table
from paceline.planner.formulas.shape import CHUNK_TOKENS, BlockShape, find_repeated_block

TERMS: dict[str, dict[str, str]] = {"time": {}, "training_memory": {}}
for _row in read_table("terms.csv"):
    TERMS[_row["kind"]][_row["term"]] = _row["words"]
"""What people read for the terms of time and memory."""
UNPACKED = 2  # copies of a matrix that was in 4 bits: its levels, and these times their scales


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device, by term, whatever the kind of work."""

    terms: ClassVar[Mapping[str, str]]  # the fields that are on the device, and what they are called
    divided: ClassVar[Mapping[str, int]] = {}  # those that more devices divide, from which stage of ZeRO on

    @property
    def host_bytes(self) -> float:
        """Return the bytes in host memory, of one rank."""
        return 0.0

    @property
    def disk_bytes(self) -> float:
        """Return the bytes left on disk, of one rank."""
        return 0.0

    @property
    def total_bytes(self) -> float:
        return float(sum(getattr(self, term) for term in self.terms))

    @property
    def allocated_bytes(self) -> float:
        """Return what the framework's allocator hands out at the peak: the number that torch reports."""
        return self.total_bytes - sum(getattr(self, name, 0.0) for name in ("context_bytes", "lost_bytes"))

    def held_bytes(self, device: Device) -> float:
        """Return what a device holds. Cores have one memory: what is offloaded stays in it."""
        return self.total_bytes + (self.host_bytes if device.synchronous else 0.0)

    def largest_term(self) -> str:
        return self.terms[self._largest]

    def shrinks_with_devices(self, stage: int) -> bool:
        """Return whether more devices would divide the largest term, under a stage of ZeRO."""
        return self._largest in self.divided and stage >= self.divided[self._largest]

    @property
    def _largest(self) -> str:
        return max(self.terms, key=lambda term: float(getattr(self, term)))


@dataclass(frozen=True)
class TrainingMemory(DeviceMemory):
    """Bytes on the fullest device at the peak of a training step, and what was moved to the host."""

    weights_bytes: float
    gradients_bytes: float
    states_bytes: float
    activations_bytes: float
    logits_bytes: float
    gathered_bytes: float  # whole weights and gradients of the layers at work, where they are kept in shards
    casts_bytes: float
    buffers_bytes: float
    lost_bytes: float  # room between allocations that none fits into
    context_bytes: float
    """Driver, libraries and the collectives' own buffers: outside the framework's allocator."""
    host_bytes: float = 0.0

    terms: ClassVar[Mapping[str, str]] = TERMS["training_memory"]
    divided: ClassVar[Mapping[str, int]] = {"states_bytes": 1, "gradients_bytes": 2, "weights_bytes": 3}


def estimate_memory(
    blocks: tuple[BlockShape, ...], placement: Placement, numbers: DtypeSizes, physics: Physics
) -> TrainingMemory:
    """Price a model (its blocks: first, repeated, last) under a layout; the first or last stage is the fullest."""
    embedding, layer, head = blocks[0], find_repeated_block(blocks), blocks[-1]
    layers = placement.layers or layer.repeat / placement.pipeline
    ends = (embedding, head) if placement.pipeline == 1 else (max(embedding, head, key=lambda b: b.params),)
    params, cast, trained = (
        (layers * getattr(layer, kind) + sum(getattr(b, kind) for b in ends)) / placement.tensor
        + layers * layer.undivided(getattr(layer, kind), placement.tensor)
        for kind in ("stored_params", "cast_params", "trained_params")
    )
    experts = layers * layer.expert_params
    weights, gradients, states, host = _states(params, trained, experts, placement, numbers)
    sample_bytes = placement.micro_batch / placement.context * numbers.element_bytes  # of an element of each sample
    saved = _saved_elements(layer, placement)
    kept = layers * _in_flight(placement) * saved + _on_the_ring(layer, placement)
    if placement.recompute == "full":  # keeps what enters each layer, and all of the one layer at work
        kept = layers * _in_flight(placement) * (layer.edge_elements / _sequence_cut(placement)) + saved
        kept += _on_the_ring(layer, placement)
    activations = sample_bytes * (kept + head.saved_whole_elements + embedding.saved_whole_elements)
    logits = _logits(head, placement, numbers)
    if placement.runtime.fresh_gradients:  # whichever is more, at the end of the forward or of the backward pass
        gradients = max(0.0, gradients + sample_bytes * saved - activations - logits)
    unpacked = UNPACKED * layer.unpacked_params * numbers.element_bytes
    axes = (placement.data, placement.tensor, placement.pipeline, placement.context)
    return TrainingMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        states_bytes=states,
        activations_bytes=activations,
        logits_bytes=logits,
        gathered_bytes=_gathered(embedding, layer, head, placement, numbers),
        casts_bytes=_casts(layer, head, cast, placement, numbers) + unpacked,
        buffers_bytes=physics.bucket_bytes if placement.zero in (1, 2) else 0.0,
        lost_bytes=physics.fragmentation * (activations + logits),
        context_bytes=physics.context_bytes + physics.communicator_bytes * sum(size > 1 for size in axes),
        host_bytes=host,
    )


def _states(
    params: float, trained: float, experts: float, placement: Placement, numbers: DtypeSizes
) -> tuple[float, float, float, float]:
    """Return (weights, gradients, optimiser states on the device; what of them is in host memory)."""
    cut = [placement.shards if placement.zero >= level else 1 for level in (1, 2, 3)]
    whole, divided = trained - min(experts, trained), min(experts, trained)  # experts are frozen together or not at all
    states, gradients = (whole / parts + divided / max(parts, placement.expert) for parts in cut[:2])
    states, gradients = states * numbers.state_bytes, gradients * numbers.gradient_bytes
    weights = ((params - experts) / cut[2] + experts / max(cut[2], placement.expert)) * numbers.weight_bytes
    if placement.offload == "none":
        return weights, gradients, states, 0.0
    host = states + gradients  # gradients leave as they are made
    return (weights, 0.0, 0.0, host) if placement.offload == "states" else (0.0, 0.0, 0.0, host + weights)


def _in_flight(placement: Placement) -> float:
    """Count passes whose activations the first stage of a pipeline holds."""
    stages, chunks = placement.pipeline, placement.chunks
    if stages == 1:
        return 1.0
    if placement.schedule == "gpipe":  # all passes forward, then all backward
        return placement.accumulate
    return min(stages * (1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1), placement.accumulate)


def _sequence_cut(placement: Placement) -> int:
    """Return the parts of what tensor parallelism leaves whole."""
    return placement.tensor if placement.sequence_parallel else 1


def _saved_elements(layer: BlockShape, placement: Placement) -> float:
    """Count what a layer keeps of a sample for the backward pass (recomputed in full: while at work)."""
    t, cut = placement.tensor, _sequence_cut(placement)
    saved = layer.saved_split_elements / t + layer.saved_whole_elements / cut + layer.expert_elements * (1 - 1 / t)
    if not placement.runtime.compiled:
        norms, features = layer.unfused_saved_elements, 1 if layer.expert_params else t
        saved += (layer.eager_saved_elements - norms) / features
        saved += 0.0 if placement.runtime.fused_norms else norms / cut
        saved += layer.routed_elements * (2 if placement.expert > 1 else 1)  # before they are put into their order
    if placement.recompute != "selective" or layer.attention is None:
        return saved + _saved_of_sequences(layer, placement)
    if not layer.attention.fused:
        return saved - layer.attention.copies * layer.attention.score_elements / t
    # the attention output and every second product are kept
    products = sum(m.rows * m.outer / (t if m.split == "outer" else cut) for m in layer.matmuls)
    return layer.edge_elements / cut + layer.edge_elements / t + products / 2


def _saved_of_sequences(layer: BlockShape, placement: Placement) -> float:
    """Count what a layer keeps because ranks divide sequences: keys and values of others, and what attention returns
    for two chunks, joined; and where it is between two compiled graphs, the stream that enters the second."""
    if layer.attention is None or placement.context == 1:
        return 0.0
    gathered = layer.attention.key_elements * (placement.context - 1) + layer.attention.query_elements
    cut = layer.edge_elements / _sequence_cut(placement) if placement.runtime.compiled else 0.0
    return cut + (0.0 if placement.ring else gathered / placement.tensor)


def _on_the_ring(layer: BlockShape, placement: Placement) -> float:
    """Count what the backward pass of one layer holds of keys and values that are passed round: with those of the next
    rank, and gradients of both in fp32; and for the queries a gradient in fp32, and keys as each head reads them."""
    if not placement.ring or layer.attention is None:
        return 0.0
    return (6 * layer.attention.key_elements + 6 * layer.attention.query_elements) / placement.tensor


def _logits(head: BlockShape, placement: Placement, numbers: DtypeSizes) -> float:
    """Count logits in the type of the products, and in fp32 with their gradient while the loss is computed.

    One kernel for the whole loss works in the memory of the logits. The gradient of its weights is there twice while
    another chunk is added to it.
    """
    runtime = placement.runtime
    kernel = runtime.compiled or (runtime.fused_norms and numbers.element_bytes == 2)
    alone = head.most_logits < math.inf and kernel and placement.tensor == 1
    alone |= placement.runtime.fused_loss
    each = numbers.element_bytes + (0.0 if alone else 8.0)
    samples, most = placement.micro_batch / placement.context, head.most_logits
    if placement.tensor > 1 and most < math.inf:  # a rank has some of the vocabulary; the gradient is made in place
        each, most = numbers.element_bytes + 4.0, min(most, CHUNK_TOKENS * head.matmuls[0].outer / placement.tensor)
    chunk = min(samples * head.saved_split_elements / placement.tensor, most)
    copies = 2 if placement.runtime.fresh_gradients else 1
    return chunk * each + copies * head.loss_params / placement.tensor * numbers.weight_bytes


def _gathered(
    embedding: BlockShape, layer: BlockShape, head: BlockShape, placement: Placement, numbers: DtypeSizes
) -> float:
    """Count whole weights of the layers at work, where each rank keeps a shard of them."""
    if placement.zero < 3:
        return 0.0
    t, e = placement.tensor, numbers.element_bytes
    away = layer.elsewhere(placement.expert)
    stored, trained = (
        (params - away) / t + layer.undivided(params, t, placement.expert)
        for params in (layer.stored_params, layer.trained_params)
    )
    largest = max(trained, embedding.trained_params / t)
    gathered = 2 * stored * numbers.gathered_bytes + largest * numbers.sent_bytes
    casts = e if numbers.cast else 0.0
    ends = sum(b.stored_params * numbers.weight_bytes + b.cast_params * casts for b in (embedding, head))
    return gathered + (ends / t if placement.runtime.keeps_ends else 0.0)


def _casts(layer: BlockShape, head: BlockShape, cast: float, placement: Placement, numbers: DtypeSizes) -> float:
    """Count copies of weights in the type of the products; `cast` are all that a rank casts."""
    runtime = placement.runtime
    if not numbers.cast or (placement.zero == 3 and not runtime.keeps_casts):
        return 0.0
    if placement.zero < 3 and runtime.compiled and placement.recompute == "full":  # cast again with the layer
        cast = (layer.cast_params + head.loss_params) / placement.tensor
        cast += layer.undivided(layer.cast_params, placement.tensor)
    return cast * numbers.element_bytes
