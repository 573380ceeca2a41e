"""Prices of what published sources say too little about: models of which only the size is known, or not even that."""

from __future__ import annotations

import math

from paceline.errors import UserError
from paceline.hardware.catalogue import Cluster
from paceline.hardware.failures import find_slowest
from paceline.planner.formulas.placement import DtypeSizes, Physics
from paceline.planner.formulas.shape import ModelShape
from paceline.planner.formulas.step_time import BUCKET_BYTES, all_reduce_s, bucketed_exposed_s, build_group

BACKWARD_SHARE = 2 / 3
"""Of the time of a pass, beside which gradients can travel."""


def count_params(shape: ModelShape) -> float:
    """Trained parameters, tied weights counted once."""
    return sum(b.repeat * b.params for b in shape.blocks)


def count_flops(shape: ModelShape) -> float:
    """Of a sample, forward and backward, attention counted in full: what MFU is usually counted with."""
    return 3 * sum(b.repeat * b.flops for b in shape.blocks)


def typical(params: float, seq_len: int = 2048, vocab: int = 50_304, gated: bool = False) -> ModelShape:
    """A usual decoder of about that many parameters, for plans that know nothing more of the model.

    Width and depth follow what people build: width ≈ 128 × layers up to 32 layers, deeper more slowly beyond.
    """
    if params < 1e5:
        raise UserError(f"a model of {params:g} parameters is too small to have a usual shape; give layers and width")
    shapes = [_with_depth(layers, params, seq_len, vocab, gated) for layers in range(2, 130, 2)]
    return min(shapes, key=lambda shape: _unusual(shape, params))


def _with_depth(layers: int, params: float, seq_len: int, vocab: int, gated: bool) -> ModelShape:
    # 12 · layers · width² + vocab · width = params
    width = (math.sqrt(vocab**2 + 48.0 * layers * params) - vocab) / (24.0 * layers)
    width = max(64, round(width / 64) * 64)
    heads = max(1, width // (128 if width >= 2048 else 64))
    return ModelShape(layers, width, heads, seq_len, vocab, _ffn(width, gated), gated=gated)


def _unusual(shape: ModelShape, params: float) -> float:
    """Distance from the wanted size and from the usual proportion of width to depth."""
    usual_width = 128.0 * shape.layers if shape.layers <= 32 else 4096 * (shape.layers / 32) ** 0.75
    return 4 * abs(math.log(count_params(shape) / params)) + abs(math.log(shape.hidden / usual_width))


def _ffn(width: int, gated: bool) -> int:
    return round(8 * width / 3 / 128) * 128 if gated else 4 * width


def data_parallel_step_s(
    alone_s: float,
    params: float,
    ranks: int,
    cluster: Cluster,
    numbers: DtypeSizes,
    physics: Physics,
    accumulate: int = 1,
) -> float:
    """A step of `ranks` devices that each do what one device does alone in `alone_s`, and average their gradients.

    Needs no shape: the way to price a workload that was measured on one device.
    """
    if ranks == 1:
        return alone_s
    sent = params * numbers.sent_bytes
    comm_s = all_reduce_s(sent, build_group(ranks, 1, cluster, physics), physics, max(1.0, sent / BUCKET_BYTES))
    visible_s = bucketed_exposed_s(comm_s, sent, BACKWARD_SHARE * alone_s / accumulate, physics)
    return (alone_s + visible_s) * (1 + physics.spread * find_slowest(ranks))
