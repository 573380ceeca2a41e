"""Read what `paceline calibrate` measured, and derive the physics of this machine from it."""

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from paceline.config.decoder_shape import DecoderShape
from paceline.hardware.catalogue import Cluster, Device, find_device
from paceline.io.arguments import option_error
from paceline.io.files import expand_cache, read_json
from paceline.planner.formulas import compute
from paceline.planner.formulas.placement import (
    CPU_PHYSICS,
    DTYPE_SIZES,
    GPU_PHYSICS,
    Kernels,
    Physics,
    Placement,
    Runtime,
)
from paceline.planner.formulas.shape import ModelShape, build_decoder_blocks

Count = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Matmuls = Annotated[tuple[tuple[Count, Count, Count, Rate], ...], Field(min_length=1)]
"""(rows, inner, outer, FLOP/s) of products."""
Attentions = tuple[tuple[Count, Count, Count, Count, Rate], ...]
"""(samples, heads, positions, features per head, seconds), forward and backward."""

CALIBRATION_FORMAT = 2
WIRE_EFFICIENCY = 0.95  # share of a network's rate that is left for payload: headers take the rest
CPU_LAYER = (16, 4, 128, 32)
"""The layer that is measured whole: samples, heads, positions, features per head; four times as wide inside."""
CPU_HALF_TILES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
GPU_LAYER = DecoderShape(vocab=1, width=1536, heads=12, kv_heads=12, layers=1, ffn=4096, context=1024)
"""The layer that is measured whole, forward and backward, on samples of its context."""
GPU_LAYER_SAMPLES = 16
GPU_HALF_TILES = (0.0, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)


@dataclass(frozen=True)
class AcceleratorRates:
    """Rates of one device, in bf16 unless stated otherwise."""

    name: str
    memory_bytes: Rate
    matmuls: Matmuls
    attentions: Annotated[Attentions, Field(min_length=1)]
    packed: Attentions  # over texts end to end; empty if the device has no such kernel
    moved_bytes_s: Rate  # element-wise kernels on large tensors
    update_bytes_s: Rate
    launch_s: Rate
    kernel_s: Rate  # of a kernel that does next to nothing, on the device
    pcie_bytes_s: Rate
    layer_s: Rate  # `GPU_LAYER`, forward and backward, weights cast from fp32
    layer_kernels: Kernels  # how that layer was run: compiled if there is a compiler

    def matmul_fit(self) -> tuple[float, float]:
        """Return (FLOP/s of a large product, tiles that reach half of it), nearest to what was measured."""
        return compute.fit_matmul_rate(self.matmuls, GPU_HALF_TILES)

    def attention_fit(self, rate: float, fp32_flops_s: float, packed: bool = False) -> float:
        """Fit the efficiency of its products to the times of all sizes, less the cost of each score."""
        packed = packed and bool(self.packed)
        flops = each_s = seconds = 0.0
        for b, h, s, d, took_s in self.packed if packed else self.attentions:
            scores = b * h * compute.count_fused_scores(s, s, causal=not packed)
            flops += (1 + compute.FUSED_BACKWARD) * 4.0 * d * scores
            each_s += 2 * scores * (compute.PACKED_SCORE_FLOPS if packed else compute.SCORE_FLOPS) / fp32_flops_s
            seconds += took_s
        return flops / (rate * max(seconds - each_s, 0.1 * seconds))

    def apply(self, where: Cluster) -> tuple[Cluster, Physics]:
        """Return the cluster with devices and physics as they were measured."""
        kind, physics = self._build_device_and_physics(where.device)
        layer = build_decoder_blocks(GPU_LAYER, GPU_LAYER.context)[1]
        placement = Placement(micro_batch=GPU_LAYER_SAMPLES, runtime=Runtime(kernels=self.layer_kernels))
        whole_s, rest_s = (
            compute.Roofline(kind, DTYPE_SIZES["amp_bf16"], kinds).price_block(layer, placement).total_s
            for kinds in (physics, replace(physics, kernel_s=0.0))
        )
        starts_s = whole_s - rest_s
        return replace(where, device=kind.slower(max(self.layer_s - starts_s, 0.1 * self.layer_s) / rest_s)), physics

    def _build_device_and_physics(self, kind: Device) -> tuple[Device, Physics]:
        rate, half_tiles = self.matmul_fit()
        physics = replace(
            GPU_PHYSICS,
            matmul_efficiency=1.0,
            half_tiles=half_tiles,
            attention_efficiency=self.attention_fit(rate, kind.flops_s["fp32"]),
            packed_efficiency=self.attention_fit(rate, kind.flops_s["fp32"], packed=True),
            bandwidth_efficiency=self.moved_bytes_s / kind.bandwidth_bytes_s,
            launch_s=self.launch_s,
            kernel_s=self.kernel_s,
        )
        measured = replace(
            kind,
            matmul_fraction=rate / kind.peak_flops_s("bf16"),
            memory_bytes=self.memory_bytes,
            update_bytes_s=self.update_bytes_s,
            pcie_bytes_s=self.pcie_bytes_s / physics.link_efficiency,
            source=f"{kind.source}; calibrated",
        )
        return measured, physics


def default_calibration_path() -> Path:
    """Return where a calibration is written and looked for unless a file is named."""
    return expand_cache(Path("~/.cache/paceline/calibration.json"))


def describe_calibration_file(file: Path) -> str:
    """Return a line on where a calibration was written, and how to plan with it."""
    if file == default_calibration_path():
        return f"written: {file}; plans for cluster: local use it"
    return f"written: {file}; to plan with it:  paceline plan RUN --calibration {shlex.quote(str(file))}"


@dataclass(frozen=True)
class RankRates:
    """What one rank reached while as many ranks as `ranks` did the same, in fp32."""

    ranks: Count
    threads: Count
    matmuls: Matmuls
    attention_flops_s: Rate
    moved_bytes_s: Rate  # element-wise kernels of a layer: norms, activation, sums
    update_bytes_s: Rate
    launch_s: Rate  # start of a small kernel, forward; backward costs twice that
    layer_s: Rate  # `CPU_LAYER`, forward and backward
    all_reduces: tuple[tuple[Rate, Rate], ...]  # (bytes, seconds)

    def matmul_fit(self) -> tuple[float, float]:
        """Return (FLOP/s of a large product, tiles that reach half of it), nearest to what was measured."""
        return compute.fit_matmul_rate(self.matmuls, CPU_HALF_TILES)

    def all_reduce_fit(self) -> tuple[float, float]:
        """Return (seconds of an empty one, bytes per second of the ring): a line through small and large."""
        if self.ranks == 1 or len(self.all_reduces) < 2:
            return 0.0, math.inf
        (small, first_s), (large, last_s) = self.all_reduces[0], self.all_reduces[-1]
        slope = max((last_s - first_s) / (large - small), 1e-13)
        return first_s, 2 * (self.ranks - 1) / self.ranks / slope


@dataclass(frozen=True)
class RankCorrection:
    """Times of a training with that many ranks, over what the probes predict."""

    ranks: Count
    compute: Rate
    communication: Rate | None


@dataclass(frozen=True)
class Correction:
    """Factors from a measured training: `paceline calibrate --from`."""

    origin: str
    date: str
    rows: Annotated[tuple[RankCorrection, ...], Field(min_length=1)]

    def at(self, ranks: int) -> tuple[float, float]:
        """Return (compute, communication) of the nearest number of ranks that has them."""
        near = sorted(self.rows, key=lambda row: _rank_distance(row.ranks, ranks))
        return near[0].compute, next((row.communication for row in near if row.communication is not None), 1.0)

    def describe(self) -> str:
        parts = []
        for row in self.rows:
            link = f", communication ×{row.communication:.3g}" if row.communication is not None else ""
            parts.append(f"{row.ranks} rank{'s' * (row.ranks > 1)}: compute ×{row.compute:.3g}{link}")
        return f"corrected by {self.origin}, {self.date}: {'; '.join(parts)}"


def _rank_distance(ranks: int, wanted: int) -> tuple[float, int]:
    return abs(math.log(ranks / wanted)), ranks


@dataclass(frozen=True)
class Calibration:
    file: str
    host: str
    cpu: str
    cores: Count
    memory_bytes: Rate
    date: str
    torch: str
    measured: tuple[RankRates, ...]  # by number of ranks, in order; empty if a CUDA device alone was measured
    correction: Correction | None = None
    gpu: AcceleratorRates | None = None

    def nearest(self, ranks: int) -> RankRates:
        return min(self.measured, key=lambda m: _rank_distance(m.ranks, ranks))

    def machine(self, most_ranks: int) -> Cluster:
        """Return the machine as one node, with a rank per core or as many as were measured, whichever is more."""
        ranks = max(self.cores, self.measured[-1].ranks)
        return Cluster(self._build_cpu_device(1), 1, min(ranks, max(most_ranks, self.measured[-1].ranks)), 1.0, 1.0)

    def at(self, ranks: int, where: Cluster) -> tuple[Cluster, Physics]:
        """Return cluster and physics for that many ranks, all on this machine, over the links of `where`."""
        found = self.nearest(ranks)
        call_s, ring_bytes_s = found.all_reduce_fit()
        slower, communication = self.correction.at(ranks) if self.correction else (1.0, 1.0)
        call_s, ring_bytes_s = call_s * communication, ring_bytes_s / communication
        rate, half_tiles = found.matmul_fit()
        physics = replace(
            CPU_PHYSICS,
            matmul_efficiency=1.0,
            half_tiles=half_tiles,
            attention_efficiency=found.attention_flops_s / rate,
            bandwidth_efficiency=1.0,
            launch_s=found.launch_s,
            link_efficiency=1.0,
            node_efficiency=1.0,
            link_latency_s=0.0,
            node_latency_s=0.0,
            call_s=call_s,
        )
        kind = self._build_cpu_device(ranks)
        # the layer that was measured whole, over what its parts took
        samples, heads, length, head_width = CPU_LAYER
        layer = ModelShape(1, heads * head_width, heads, length, 1, causal=False, classes=2).blocks[1]
        price = compute.Roofline(kind, DTYPE_SIZES["fp32"], physics).price_block(layer, Placement(micro_batch=samples))
        kind = kind.slower(found.layer_s / price.total_s * max(1.0, ranks / found.ranks)).slower(slower)
        kind = replace(kind, update_bytes_s=(kind.update_bytes_s or 0.0) / slower)
        physics = replace(physics, launch_s=physics.launch_s * slower)
        if where.nodes > 1:
            nodes, per_node = max(1, math.ceil(ranks / where.per_node)), min(ranks, where.per_node)
            wire_bytes_s = min(ring_bytes_s, where.node_bytes_s * WIRE_EFFICIENCY)
            return Cluster(kind, nodes, per_node, ring_bytes_s, wire_bytes_s, 0.0), physics
        return Cluster(kind, 1, ranks, ring_bytes_s, ring_bytes_s, None), physics

    def _build_cpu_device(self, ranks: int) -> Device:
        found = self.nearest(ranks)
        rate = found.matmul_fit()[0] / compute.PLAIN_MATMUL_FRACTION
        crowd = max(1.0, ranks / found.ranks)
        return replace(
            find_device("CPU"),
            name=f"{self.cores} cores",
            memory_bytes=self.memory_bytes / ranks,
            bandwidth_bytes_s=found.moved_bytes_s / crowd,
            flops_s={"fp32": rate / crowd, "bf16": rate / crowd, "fp16": rate / crowd},
            pcie_bytes_s=1e10,
            watts=20.0 * self.cores / ranks,
            source=f"calibrated on {self.host}",
            date=self.date,
            update_bytes_s=found.update_bytes_s / crowd,
        )


def read_calibration(path: Path) -> Calibration:
    values = read_json(path)
    if values.get("format") != CALIBRATION_FORMAT:
        problem = f"{path} is not a calibration of format {CALIBRATION_FORMAT}; make one with  paceline calibrate"
        raise option_error("--calibration", problem, "invalid-format")
    try:
        found = TypeAdapter(Calibration).validate_python({**values, "file": str(path)})
    except ValidationError as error:
        first = error.errors()[0]
        cause = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        problem = f"{path} is damaged: {cause}; make it again with  paceline calibrate"
        raise option_error("--calibration", problem, "damaged") from None
    return replace(found, measured=tuple(sorted(found.measured, key=lambda row: row.ranks)))
