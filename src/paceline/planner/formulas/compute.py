"""Time of the arithmetic: a roofline whose efficiency depends on the sizes, beside the host that launches it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.hardware.catalogue import Device
from paceline.planner.formulas.placement import DtypeSizes, Physics, Placement, Runtime
from paceline.planner.formulas.shape import (
    LAUNCHES_PER_OPERATION,
    LOSS_PASSES,
    AttentionShape,
    BlockShape,
    EagerTraffic,
)

TILE = 128  # side of the piece of a result that one multiprocessor works on
DEFAULT_MATMUL_FRACTION = 0.80
"""Of the peak, in a bare matrix product, for devices without a published measurement."""
PLAIN_MATMUL_FRACTION = 0.95
"""The same for units that multiply without tensor cores: their operands arrive in time."""
FUSED_BACKWARD = 2.5  # a fused backward pass makes five products for the two of the forward pass
SCORE_FLOPS = 18.0  # plain operations in whose time a GPU scales, compares, exponentiates and sums a score
PACKED_SCORE_FLOPS = 45.0  # the same where a text ends within a tile or two: nothing runs beside it
MASKED_SCORE_FLOPS = 250.0  # where a kernel reads a mask for each score
FP8_CAST_BYTES = {"eager": 6.0, "compiled": 6.0, "fused": 2.0}
"""An operand read in 16 bits for its range and again for the cast, and written in 8 bits twice, once transposed; where
kernels are fused by hand, the one before casts with the range of earlier steps, and only the writes remain."""
RING_BYTES, RING_ROWS = 20.0, 0.75
"""Moved for each feature of a query to join a round of a ring to those before, in fp32, and to repeat keys for heads
that share them; of the queries, those that see anything in a round."""
UPDATE_TAIL_S = 60e-6
"""Of an update, for weights that decay and for others together: the last pieces keep few multiprocessors busy."""
UNPACK, COMPILED_UNPACK = 10.5, 2.5  # bytes read and written to unpack a weight in 4 bits to 16
PLAIN_BANDWIDTH, FUSED_BANDWIDTH = 0.86, 0.78
"""Of the data sheet's, by an element-wise kernel over large tensors, where all that kernels move was counted; by one
that a compiler fused."""
RECURRENT_STEP = 1.33  # kernels of a step of a recurrent layer, one after the other: others run beside them
PLAIN_SCORE_PASSES, DROPPED_SCORE_PASSES = 6.0, 13.2
"""Reads and writes of the scores in an attention that stores them: written, masked and normalised, dropped, read; and
where each is a kernel of its own, with casts between them."""
COMPILED_LAUNCHES = 0.4
"""Of the host's time for a layer of eager kernels, where each layer is compiled: guards, and fewer kernels."""


@dataclass(frozen=True)
class BlockTime:
    """Times of one micro-batch through one block on one device."""

    forward_s: float
    backward_s: float
    recompute_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s


def matmul_rate(device: Device, dtype: str, physics: Physics) -> float:
    """Return the FLOP/s of a large product in the midst of training."""
    fraction = device.matmul_fraction or DEFAULT_MATMUL_FRACTION
    if device.peak_flops_s(dtype) == device.flops_s.get("fp32"):
        fraction = PLAIN_MATMUL_FRACTION
    return device.peak_flops_s(dtype) * fraction * physics.matmul_efficiency


def fit_matmul_rate(matmuls: Sequence[tuple[int, int, int, float]], halves: Sequence[float]) -> tuple[float, float]:
    """Fit (FLOP/s of a large product, tiles that reach half of it) to measured (rows, inner, outer, FLOP/s).

    Of the numbers of tiles in `halves`, the one whose rates agree best.
    """
    best = (math.inf, 0.0, 0.0)
    for half in halves:
        logs = [math.log(rate * (_tiles(rows, outer) + half) / _tiles(rows, outer)) for rows, _, outer, rate in matmuls]
        mean = sum(logs) / len(logs)
        best = min(best, (sum((x - mean) ** 2 for x in logs), math.exp(mean), half))
    return best[1], best[2]


def _tiles(rows: float, outer: float) -> int:
    return math.ceil(rows / TILE) * math.ceil(outer / TILE)


def _raggedness(side: float) -> float:
    """Return how rows miss the memory's grid: 0 for multiples of 64 elements, 1 of 8, 2 for odd numbers."""
    return math.log2(64 / math.gcd(math.ceil(side), 64)) / 3


def count_fused_scores(length: int, span: int, causal: bool) -> float:
    """Count the scores of one head that a fused kernel computes: whole tiles, and one more per row of tiles."""
    rows, columns = math.ceil(length / TILE), math.ceil(span / TILE)
    tiles = rows * (columns - (rows - 1) / 2 if causal else columns)
    return float((tiles + rows) * TILE * TILE)


@dataclass(frozen=True)
class Roofline:
    """Prices kernels on a device, in the types and with the physics of a run."""

    device: Device
    numbers: DtypeSizes
    physics: Physics

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth_bytes_s * self.physics.bandwidth_efficiency

    def matmul_s(self, rows: float, inner: float, outer: float) -> float:
        """Return the seconds of one product: the slower of arithmetic and memory."""
        moved = (rows * inner + inner * outer + rows * outer) * self.numbers.element_bytes
        return float(max(self._arithmetic_s(rows, inner, outer), moved / self.bandwidth))

    def _arithmetic_s(self, rows: float, inner: float, outer: float, ragged: bool = True) -> float:
        """Return the seconds of arithmetic, at a rate that small sides lower, and `ragged` ones."""
        tiles = _tiles(rows, outer)
        size = tiles / (tiles + self.physics.half_tiles)
        if ragged:
            size *= math.pow(self.physics.ragged_efficiency, max(_raggedness(inner), _raggedness(outer)))
        return 2.0 * rows * inner * outer / (matmul_rate(self.device, self.numbers.matmul, self.physics) * size)

    def attention_s(self, attention: AttentionShape, placement: Placement) -> tuple[float, float]:
        """Forward and backward time of the score products; they run in 16 bits even where weights are in 8."""
        device, physics = self.device, self.physics
        share = placement.micro_batch / (placement.tensor * placement.context)
        rate = matmul_rate(device, "bf16" if self.numbers.matmul == "fp8" else self.numbers.matmul, physics)
        if attention.fused:
            scores = attention.heads * count_fused_scores(attention.length, attention.span, attention.causal) * share
            packed = attention.packed and not device.synchronous  # cores see no difference
            efficiency = physics.packed_efficiency if packed else physics.attention_efficiency
            flops = MASKED_SCORE_FLOPS if attention.masked else PACKED_SCORE_FLOPS if packed else SCORE_FLOPS
            score_s = flops / device.flops_s["fp32"]
            if placement.runtime.older_attention or placement.ring:  # the kernel that returns sums is flash attention 2
                efficiency *= device.older_fraction
            products = 4.0 * attention.head_width * scores / (rate * efficiency)
            each_s = scores * score_s
            if placement.ring:
                rounds = RING_ROWS * (placement.context - 1)
                each_s += rounds * RING_BYTES * attention.query_elements * share / self.bandwidth
            return products + each_s, FUSED_BACKWARD * products + each_s
        products = attention.flops * share / rate
        passes = DROPPED_SCORE_PASSES if attention.dropped and not device.synchronous else PLAIN_SCORE_PASSES
        moved = passes * attention.score_elements * share * self.numbers.element_bytes
        scores = moved / self.bandwidth
        return products + scores, 2 * (products + scores)

    def price_block(self, block: BlockShape, placement: Placement) -> BlockTime:
        """Price one block of one micro-batch on one device."""
        if self.numbers.matmul == "fp8" and block.name == "head":  # the loss needs more than 8 bits
            return replace(self, numbers=replace(self.numbers, matmul="bf16")).price_block(block, placement)
        runtime, physics = placement.runtime, self.physics
        products = self._products_s(block, placement)
        attention = self.attention_s(block.attention, placement) if block.attention else (0.0, 0.0)
        forward_s, backward_s, elementwise_s = self._price_elementwise(block, placement)
        forward = products + attention[0] + forward_s
        with_gradients = block.trained_params / block.params if block.frozen_params else 1.0  # frozen weights have none
        backward = (1 + with_gradients) * products + attention[1] + backward_s
        recompute = 0.0
        if placement.recompute == "full" and block.edge_elements:
            sizes = [m.inner * m.outer for m in block.matmuls]  # nothing that is made again needs the last product
            recompute = forward - (sizes[-1] / sum(sizes) * products if runtime.stops_early and sizes else 0.0)
        elif placement.recompute == "selective" and block.attention is not None:
            # stored scores are made again; without them, every second product and what lies between
            recompute = attention[0] if not block.attention.fused else products / 2 + elementwise_s
        if runtime.one_graph:
            return BlockTime(forward, backward, recompute)
        host = block.kernels * physics.launch_s * (COMPILED_LAUNCHES if runtime.compiled else 1.0)
        parts = ((forward, host), (backward, 2 * host), (recompute, host * (recompute / forward if forward else 0.0)))
        if self.device.synchronous:
            return BlockTime(*map(sum, parts))
        # the slower of two that run beside each other, with the rounded corner that real queues show
        return BlockTime(*((device_s**4 + host_s**4) ** 0.25 for device_s, host_s in parts))

    def _price_elementwise(self, block: BlockShape, placement: Placement) -> tuple[float, float, float]:
        """Price traffic, casts and starts of kernels: (forward, backward, the traffic of the first alone)."""
        physics, numbers, bandwidth = self.physics, self.numbers, self.bandwidth
        t, runtime, samples = placement.tensor, placement.runtime, placement.micro_batch / placement.context
        if block.eager is not None and not runtime.compiled and not self.device.synchronous:
            bandwidth = self.device.bandwidth_bytes_s * max(PLAIN_BANDWIDTH, physics.bandwidth_efficiency)
            each_s, formats = numbers.element_bytes / bandwidth, [block.eager]
            if runtime.channels_last and block.channels_last is not None:
                formats.append(block.channels_last)
            forward, backward = min((_price_eager(of, samples, each_s, physics.kernel_s) for of in formats), key=sum)
            return forward, backward, samples * block.eager.forward_elements * each_s
        cut = t if placement.sequence_parallel or block.name == "head" else (1 + t) / 2
        cut = 1 if block.expert_params else cut  # what experts move is most of it, and whole
        passes = {"eager": physics.fusion, "fused": (1 + physics.fusion) / 2, "compiled": 1.0}[runtime.kernels]
        moved = passes * block.moved_elements
        if block.eager is not None and runtime.compiled and not self.device.synchronous:
            bandwidth = self.device.bandwidth_bytes_s * max(FUSED_BANDWIDTH, physics.bandwidth_efficiency)
            moved += block.gathered_elements
        if runtime.fused_loss and block.name == "head":
            moved = LOSS_PASSES * block.saved_split_elements
        elementwise = moved * samples * numbers.element_bytes / cut / bandwidth
        beside = block.eager_elements + (0.0 if self.device.synchronous else block.cast_elements)
        unfused = 0.0 if runtime.compiled else beside * samples * numbers.element_bytes
        # gradients of cast weights come out of their products in 16 bits, and are widened
        cast_params = 6.0 * block.cast_params / t + 6.0 * block.undivided(block.cast_params, t)
        casts = cast_params / bandwidth if numbers.cast else 0.0
        casts += (COMPILED_UNPACK if runtime.compiled else UNPACK) * block.packed_params / t / bandwidth
        starts = 0.0 if self.device.synchronous else _count_kernels(block, runtime) * physics.kernel_s
        forward = elementwise + casts + unfused / bandwidth + starts
        return forward, 2 * elementwise + casts + 2 * starts, elementwise

    def _products_s(self, block: BlockShape, placement: Placement) -> float:
        """Price a block's products, forward, as tensor parallelism cuts them, and casts to 8 bits."""
        total, t, samples = 0.0, placement.tensor, placement.micro_batch / placement.context
        for m in block.matmuls:
            inner = m.inner / t if m.split == "inner" else m.inner
            outer = m.outer / t if m.split == "outer" else m.outer
            if block.name == "head":  # vocabularies are padded
                outer = math.ceil(outer / 64) * 64
            if m.steps > 1 and not self.device.synchronous:  # the gradient of the weight is one product
                step_s = RECURRENT_STEP * self.physics.kernel_s + self._arithmetic_s(
                    m.rows * samples / m.steps, inner, outer
                )
                total += (2 * m.steps * step_s + self.matmul_s(m.rows * samples, inner, outer)) / 3
            elif m.useful != 1 and not self.device.synchronous:  # its operands are not in memory as a product reads
                total += self._arithmetic_s(m.rows * samples, inner, outer, ragged=False) / m.useful
            else:
                total += self.matmul_s(m.rows * samples, inner, outer)
        if self.numbers.matmul == "fp8":
            inputs = sum(m.rows * m.inner / (t if m.split == "inner" else 1) for m in block.matmuls)
            total += FP8_CAST_BYTES[placement.runtime.kernels] * samples * inputs / self.bandwidth
        return total

    def optimizer_s(self, params: float) -> float:
        """Price the update: all is moved once, and clipping reads gradients once more."""
        tail_s = 0.0 if self.device.synchronous else UPDATE_TAIL_S
        return params * self.numbers.updated_bytes / (self.device.update_bytes_s or self.bandwidth) + tail_s


def _price_eager(of: EagerTraffic, samples: float, each_s: float, kernel_s: float) -> tuple[float, float]:
    forward = (samples * of.forward_elements + of.forward_fixed) * each_s + of.forward_kernels * kernel_s
    return forward, (samples * of.backward_elements + of.backward_fixed) * each_s + of.backward_kernels * kernel_s


def _count_kernels(block: BlockShape, runtime: Runtime) -> float:
    """Count the kernels of a forward pass: three per matmul (its own, the cast of its weight, element-wise work
    after it) and two of attention. Eager code recorded as one graph has at least one per operation and per cast."""
    fused = 3 * len(block.matmuls) + 2
    if runtime.compiled or not runtime.one_graph:
        return fused
    return max(fused, block.kernels / LAUNCHES_PER_OPERATION + len(block.matmuls))
