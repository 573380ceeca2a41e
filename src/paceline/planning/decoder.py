"""The shape of the built-in decoder, from its sizes: parameters to the last one, and a loss that is chunked."""

from __future__ import annotations

from dataclasses import replace

from paceline.planning.shape import LAUNCHES_PER_OPERATION, Block, ModelShape
from paceline.workloads.shapes import DecoderShape

MOST_LOGITS = float(1 << 27)
"""Logits of one chunk of the loss on a device."""
ROTARY_PASSES = 9
"""Over queries and keys, to turn each pair of features, where no compiler fuses them."""
ROTARY_OPERATIONS = 22
GATE_PASSES = 2
"""Over the features of a gated feed-forward part, beside those of a plain one."""


def decoder_blocks(sizes: DecoderShape, length: int) -> tuple[Block, ...]:
    shape = ModelShape(
        layers=sizes.layers,
        hidden=sizes.width,
        heads=sizes.heads,
        seq_len=length,
        vocab=sizes.vocab,
        ffn_hidden=sizes.ffn,
        kv_heads=sizes.kv_heads,
        gated=sizes.ffn_kind == "swiglu",
        tied=sizes.tied,
        learned_positions=False,
        biases=False,
    )
    embedding, layer, head = shape.blocks
    rotary, gated = sizes.positions == "rotary", sizes.ffn_kind == "swiglu"
    turned = sizes.head_dim * (sizes.heads + sizes.kv_heads)
    tables = sizes.vocab + (sizes.context if sizes.positions == "learned" else 0)
    return (
        replace(embedding, params=tables * sizes.width),
        replace(
            layer,
            eager_elements=length * (ROTARY_PASSES * turned * rotary + GATE_PASSES * sizes.ffn * gated),
            kernels=layer.kernels + LAUNCHES_PER_OPERATION * ROTARY_OPERATIONS * 2 / 3 * rotary,
        ),
        replace(
            head,
            params=sizes.width + (0 if sizes.tied else sizes.vocab * sizes.width),
            most_logits=MOST_LOGITS,
        ),
    )
