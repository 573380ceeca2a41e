"""A measured CUDA device: what `paceline calibrate` found on it, and the cluster and physics that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, get_args

from paceline.errors import UserError
from paceline.hardware.catalogue import Cluster, Device, known
from paceline.planning.formulas.compute import (
    FUSED_BACKWARD,
    PACKED_SCORE_FLOPS,
    SCORE_FLOPS,
    block_time,
    fused_scores,
    rate_and_half_tiles,
)
from paceline.planning.formulas.decoder import decoder_blocks
from paceline.planning.formulas.numbers import NUMBERS
from paceline.planning.formulas.physics import Physics
from paceline.planning.formulas.placement import Kernels, Placement, Runtime
from paceline.shapes import DecoderShape

WHOLE = DecoderShape(vocab=1, width=1536, heads=12, kv_heads=12, layers=1, ffn=4096, context=1024)
"""The layer that is measured whole, forward and backward, on samples of its context."""
WHOLE_SAMPLES = 16
FASTER = 2.0
"""Than the fastest product that was measured: no layer is, whatever the noise."""
HALF_TILES = (0.0, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)


@dataclass(frozen=True)
class Accelerator:
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
        return rate_and_half_tiles(self.matmuls, HALF_TILES)

    @property
    def attention_flops_s(self) -> float:
        """Over all sizes; the half that is skipped is not counted."""
        flops = sum(2.0 * d * b * h * s * s for b, h, s, d, _ in self.attentions)
        return (1 + FUSED_BACKWARD) * flops / sum(took_s for *_, took_s in self.attentions)

    def attention_fit(self, rate: float, fp32_flops_s: float, packed: bool = False) -> float:
        """The efficiency of its products that explains the time of all sizes, what each score costs being apart."""
        packed = packed and bool(self.packed)
        flops = each_s = seconds = 0.0
        for b, h, s, d, took_s in self.packed if packed else self.attentions:
            scores = b * h * fused_scores(s, s, causal=not packed)
            flops += (1 + FUSED_BACKWARD) * 4.0 * d * scores
            each_s += 2 * scores * (PACKED_SCORE_FLOPS if packed else SCORE_FLOPS) / fp32_flops_s
            seconds += took_s
        return flops / (rate * max(seconds - each_s, 0.1 * seconds))

    def applied(self, where: Cluster) -> tuple[Cluster, Physics]:
        """The cluster with devices as they were measured, and the physics that were."""
        kind, physics = self._parts(where.device)
        layer = decoder_blocks(WHOLE, WHOLE.context)[1]
        placement = Placement(micro_batch=WHOLE_SAMPLES, runtime=Runtime(kernels=self.layer_kernels))
        whole_s, rest_s = (
            block_time(layer, placement, kind, NUMBERS["amp_bf16"], kinds).total_s
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


def accelerator_of(values: dict[str, Any]) -> Accelerator:
    """What a calibration file says of a device; ValueError where that cannot be."""
    matmuls = tuple((int(m), int(k), int(n), float(rate)) for m, k, n, rate in values["matmuls"])
    attentions, packed = (
        tuple((int(b), int(h), int(s), int(d), float(took)) for b, h, s, d, took in values.get(name, ()))
        for name in ("attentions", "packed")
    )
    lists = {"matmuls": matmuls, "attentions": attentions, "packed": packed}
    found = Accelerator(**{**values, "name": str(values["name"]), **lists})
    rates = [v for k, v in vars(found).items() if k not in (*lists, "name", "layer_kernels")]
    rates += [last for rows in lists.values() for *_, last in rows]
    if not matmuls or not attentions or not all(math.isfinite(float(v)) and v > 0 for v in rates):
        raise ValueError("its rates of a device cannot be")
    if found.layer_kernels not in get_args(Kernels):
        raise ValueError(f"layer_kernels is {found.layer_kernels!r}, and not one of {', '.join(get_args(Kernels))}")
    flops = 3 * WHOLE_SAMPLES * decoder_blocks(WHOLE, WHOLE.context)[1].flops
    if found.layer_s * FASTER * max(rate for *_, rate in matmuls) < flops:
        raise ValueError(f"layer_s is {found.layer_s:g}, less than the products of that layer take")
    return found


def catalogued(found: Accelerator) -> Device:
    """The catalogue's facts on a measured device: links and power were not measured."""
    kind = known(found.name)
    if kind is None:
        raise UserError(
            f"{found.name} was calibrated, but its links and power are not in the catalogue; "
            "say them in a cluster file, with  catalogue: mine.csv"
        )
    return kind
