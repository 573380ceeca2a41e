"""A measured machine: what `paceline calibrate` found, and the physics that follow from it.

Ranks on one machine slow each other down, so each number was measured by 1, 2, 4, … ranks at the same time. A plan for
n ranks uses the measurement of n, or of the nearest number that was measured.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from paceline.config.decoder_shape import DecoderShape
from paceline.errors import UserError
from paceline.hardware.catalogue import Cluster, Device, find_device, match_driver_name
from paceline.io.files import read_json
from paceline.planner.formulas import compute
from paceline.planner.formulas.physics import CPU_PHYSICS, Physics
from paceline.planner.formulas.placement import DTYPE_SIZES, Kernels, Placement, Runtime
from paceline.planner.formulas.shape import ModelShape, build_decoder_blocks

CALIBRATION_FORMAT = 2
WIRE_EFFICIENCY = 0.95
"""Of a network's rate, left for what is sent: headers take the rest."""
CPU_LAYER = (16, 4, 128, 32)
"""The layer that is measured whole: samples, heads, positions, features per head; four times as wide inside."""
CPU_HALF_TILES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
GPU_LAYER = DecoderShape(vocab=1, width=1536, heads=12, kv_heads=12, layers=1, ffn=4096, context=1024)
"""The layer that is measured whole, forward and backward, on samples of its context."""
GPU_LAYER_SAMPLES = 16
MAX_OVER_PRODUCTS = 2.0
"""Than the fastest product that was measured: no layer is, whatever the noise."""
GPU_HALF_TILES = (0.0, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)


@dataclass(frozen=True)
class AcceleratorRates:
    """Rates of one device, in bf16 where nothing else is said."""

    name: str
    memory_bytes: float
    matmuls: tuple[tuple[int, int, int, float], ...]
    """(rows, inner, outer, FLOP/s)."""
    attentions: tuple[tuple[int, int, int, int, float], ...]
    """(samples, heads, positions, features per head, seconds) of fused causal attention, forward and backward."""
    packed: tuple[tuple[int, int, int, int, float], ...]
    """(texts, heads, positions of each, features per head, seconds) over texts end to end; empty if that cannot be."""
    moved_bytes_s: float
    """Element-wise kernels on large tensors."""
    update_bytes_s: float
    launch_s: float
    """By the host."""
    kernel_s: float
    """Of one that does next to nothing, on the device."""
    pcie_bytes_s: float
    layer_s: float
    """The layer `WHOLE`, forward and backward, weights cast from fp32."""
    layer_kernels: Kernels
    """How that layer was run: compiled where a compiler is there."""

    def matmul_fit(self) -> tuple[float, float]:
        """(FLOP/s of a large product, tiles that reach half of it), nearest to what was measured."""
        return compute.fit_matmul_rate(self.matmuls, GPU_HALF_TILES)

    @property
    def attention_flops_s(self) -> float:
        """Over all sizes; the half that is skipped is not counted."""
        flops = sum(2.0 * d * b * h * s * s for b, h, s, d, _ in self.attentions)
        return (1 + compute.FUSED_BACKWARD) * flops / sum(took_s for *_, took_s in self.attentions)

    def attention_fit(self, rate: float, fp32_flops_s: float, packed: bool = False) -> float:
        """The efficiency of its products that explains the time of all sizes, what each score costs being apart."""
        packed = packed and bool(self.packed)
        flops = each_s = seconds = 0.0
        for b, h, s, d, took_s in self.packed if packed else self.attentions:
            scores = b * h * compute.count_fused_scores(s, s, causal=not packed)
            flops += (1 + compute.FUSED_BACKWARD) * 4.0 * d * scores
            each_s += 2 * scores * (compute.PACKED_SCORE_FLOPS if packed else compute.SCORE_FLOPS) / fp32_flops_s
            seconds += took_s
        return flops / (rate * max(seconds - each_s, 0.1 * seconds))

    def apply(self, where: Cluster) -> tuple[Cluster, Physics]:
        """The cluster with devices as they were measured, and the physics that were."""
        kind, physics = self._parts(where.device)
        layer = build_decoder_blocks(GPU_LAYER, GPU_LAYER.context)[1]
        placement = Placement(micro_batch=GPU_LAYER_SAMPLES, runtime=Runtime(kernels=self.layer_kernels))
        whole_s, rest_s = (
            compute.price_block(layer, placement, kind, DTYPE_SIZES["amp_bf16"], kinds).total_s
            for kinds in (physics, replace(physics, kernel_s=0.0))
        )
        starts_s = whole_s - rest_s
        return replace(where, device=kind.slower(max(self.layer_s - starts_s, 0.1 * self.layer_s) / rest_s)), physics

    def _parts(self, kind: Device) -> tuple[Device, Physics]:
        rate, half_tiles = self.matmul_fit()
        physics = replace(
            Physics(),
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


def parse_accelerator_rates(values: dict[str, Any]) -> AcceleratorRates:
    """What a calibration file says of a device; ValueError where that cannot be."""
    matmuls = tuple((int(m), int(k), int(n), float(rate)) for m, k, n, rate in values["matmuls"])
    attentions, packed = (
        tuple((int(b), int(h), int(s), int(d), float(took)) for b, h, s, d, took in values.get(name, ()))
        for name in ("attentions", "packed")
    )
    lists = {"matmuls": matmuls, "attentions": attentions, "packed": packed}
    found = AcceleratorRates(**{**values, "name": str(values["name"]), **lists})
    rates = [v for k, v in vars(found).items() if k not in (*lists, "name", "layer_kernels")]
    rates += [last for rows in lists.values() for *_, last in rows]
    if not matmuls or not attentions or not all(math.isfinite(float(v)) and v > 0 for v in rates):
        raise ValueError("its rates of a device cannot be")
    if found.layer_kernels not in get_args(Kernels):
        raise ValueError(f"layer_kernels is {found.layer_kernels!r}, and not one of {', '.join(get_args(Kernels))}")
    flops = 3 * GPU_LAYER_SAMPLES * build_decoder_blocks(GPU_LAYER, GPU_LAYER.context)[1].flops
    if found.layer_s * MAX_OVER_PRODUCTS * max(rate for *_, rate in matmuls) < flops:
        raise ValueError(f"layer_s is {found.layer_s:g}, less than the products of that layer take")
    return found


def find_catalogue_device(found: AcceleratorRates) -> Device:
    """The catalogue's facts on a measured device: links and power were not measured."""
    kind = match_driver_name(found.name)
    if kind is None:
        raise UserError(
            f"{found.name} was calibrated, but its links and power are not in the catalogue; "
            "say them in a cluster file, with  catalogue: mine.csv"
        )
    return kind


def default_calibration_path() -> Path:
    """Where a calibration is written and looked for unless a file is named; `plan` says when it uses it."""
    return Path("~/.cache/paceline/calibration.json").expanduser()


def describe_calibration_file(file: Path) -> str:
    """That a calibration was written, and how plans are made by it."""
    if file == default_calibration_path():
        return f"written: {file}; plans for cluster: local use it"
    return f"written: {file}; to plan by it:  paceline plan RUN --calibration {shlex.quote(str(file))}"


@dataclass(frozen=True)
class RankRates:
    """What one rank reached while as many ranks as `ranks` did the same."""

    ranks: int
    threads: int
    matmuls: tuple[tuple[int, int, int, float], ...]
    """(rows, inner, outer, FLOP/s) of fp32 products."""
    attention_flops_s: float
    moved_bytes_s: float
    """Element-wise kernels of a layer: norms, activation, sums."""
    update_bytes_s: float
    launch_s: float
    """Start of a small kernel, forward; backward costs twice that."""
    layer_s: float
    """A whole small layer (`CPU_LAYER`), forward and backward."""
    all_reduces: tuple[tuple[float, float], ...]
    """(bytes, seconds)."""

    def matmul_fit(self) -> tuple[float, float]:
        """(FLOP/s of a large product, tiles that reach half of it), nearest to what was measured."""
        return compute.fit_matmul_rate(self.matmuls, CPU_HALF_TILES)

    def all_reduce_fit(self) -> tuple[float, float]:
        """(seconds of an empty one, bytes per second of the ring): a line through small and large."""
        if self.ranks == 1 or len(self.all_reduces) < 2:
            return 0.0, math.inf
        (small, first_s), (large, last_s) = self.all_reduces[0], self.all_reduces[-1]
        slope = max((last_s - first_s) / (large - small), 1e-13)
        return first_s, 2 * (self.ranks - 1) / self.ranks / slope


@dataclass(frozen=True)
class RankCorrection:
    """Times of a training with that many ranks, over what the probes foretell."""

    ranks: int
    compute: float
    communication: float | None
    """None on one rank."""


@dataclass(frozen=True)
class Correction:
    """What a measured training says about the probes: `paceline calibrate --from`."""

    origin: str
    date: str
    rows: tuple[RankCorrection, ...]

    def at(self, ranks: int) -> tuple[float, float]:
        """(compute, communication) of the nearest number of ranks that says something about it."""
        near = sorted(self.rows, key=lambda row: _rank_distance(row.ranks, ranks))
        return near[0].compute, next((row.communication for row in near if row.communication is not None), 1.0)

    def describe(self) -> str:
        told = []
        for row in self.rows:
            link = f", communication ×{row.communication:.3g}" if row.communication is not None else ""
            told.append(f"{row.ranks} rank{'s' * (row.ranks > 1)}: compute ×{row.compute:.3g}{link}")
        return f"corrected by {self.origin}, {self.date}: {'; '.join(told)}"


def _rank_distance(ranks: int, wanted: int) -> tuple[float, int]:
    return abs(math.log(ranks / wanted)), ranks


@dataclass(frozen=True)
class Calibration:
    file: str
    """It was read from."""
    host: str
    cpu: str
    cores: int
    memory_bytes: float
    date: str
    torch: str
    measured: tuple[RankRates, ...]
    """By number of ranks, in order; none where a CUDA device alone was measured."""
    correction: Correction | None = None
    gpu: AcceleratorRates | None = None

    def nearest(self, ranks: int) -> RankRates:
        return min(self.measured, key=lambda m: _rank_distance(m.ranks, ranks))

    def machine(self, most_ranks: int) -> Cluster:
        """The machine as a cluster of one node, with a rank per core or what was measured, whichever is more."""
        ranks = max(self.cores, self.measured[-1].ranks)
        return Cluster(self._device(1), 1, min(ranks, max(most_ranks, self.measured[-1].ranks)), 1.0, 1.0)

    def at(self, ranks: int, where: Cluster) -> tuple[Cluster, Physics]:
        """The cluster and the physics for that many ranks, all on this machine, over the links of `where`."""
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
        kind = self._device(ranks)
        kind = kind.slower(found.layer_s / _layer_parts_s(kind, physics) * max(1.0, ranks / found.ranks)).slower(slower)
        kind = replace(kind, update_bytes_s=(kind.update_bytes_s or 0.0) / slower)
        physics = replace(physics, launch_s=physics.launch_s * slower)
        if where.nodes > 1:
            nodes, per_node = max(1, math.ceil(ranks / where.per_node)), min(ranks, where.per_node)
            wire_bytes_s = min(ring_bytes_s, where.node_bytes_s * WIRE_EFFICIENCY)
            return Cluster(kind, nodes, per_node, ring_bytes_s, wire_bytes_s, 0.0), physics
        return Cluster(kind, 1, ranks, ring_bytes_s, ring_bytes_s, None), physics

    def _device(self, ranks: int) -> Device:
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


def _layer_parts_s(kind: Device, physics: Physics) -> float:
    """The price of the layer that was measured whole, from the measurements of its parts."""
    samples, heads, length, head_width = CPU_LAYER
    shape = ModelShape(1, heads * head_width, heads, length, 1, causal=False, classes=2)
    return compute.price_block(
        shape.blocks[1], Placement(micro_batch=samples), kind, DTYPE_SIZES["fp32"], physics
    ).total_s


def read_calibration(path: Path) -> Calibration:
    values = read_json(path)
    if values.get("format") != CALIBRATION_FORMAT:
        message = f"{path} is not a calibration of format {CALIBRATION_FORMAT}; make one with  paceline calibrate"
        raise UserError(message, code="invalid-format", key="--calibration")
    try:
        rows = tuple(_parse_rank_rates(row) for row in values["measured"])
        facts = {name: values[name] for name in ("host", "cpu", "cores", "memory_bytes", "date", "torch")}
        correction = _parse_correction(values["correction"]) if "correction" in values else None
        gpu = parse_accelerator_rates(values["gpu"]) if values.get("gpu") else None
        if not rows and gpu is None:
            raise ValueError("nothing was measured")
        rows = tuple(sorted(rows, key=lambda row: row.ranks))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        message = f"{path} is damaged: {error}; make it again with  paceline calibrate"
        raise UserError(message, code="damaged", key="--calibration") from None
    return Calibration(str(path), **facts, measured=rows, correction=correction, gpu=gpu)


def _parse_correction(values: dict[str, Any]) -> Correction:
    rows = tuple(RankCorrection(**row) for row in values["rows"])
    factors = [value for row in rows for value in (row.ranks, row.compute, row.communication) if value is not None]
    if not rows or not all(math.isfinite(value) and value > 0 for value in factors):
        raise ValueError("its correction cannot be")
    return Correction(str(values["origin"]), str(values["date"]), rows)


def _parse_rank_rates(row: dict[str, Any]) -> RankRates:
    matmuls = tuple((int(m), int(k), int(n), float(rate)) for m, k, n, rate in row["matmuls"])
    reduces = tuple((float(sent), float(seconds)) for sent, seconds in row["all_reduces"])
    rest = {k: v for k, v in row.items() if k not in ("matmuls", "all_reduces")}
    numbers = [*rest.values(), *(number for some in (*matmuls, *reduces) for number in some)]
    if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers if number is not None):
        raise ValueError("it holds what cannot be measured")
    return RankRates(**rest, matmuls=matmuls, all_reduces=reduces)
