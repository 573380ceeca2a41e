"""The shape of the built-in decoder, from its sizes: parameters to the last one, and a loss that is chunked."""

from __future__ import annotations

from dataclasses import replace

from paceline.planning.formulas.shape import LAUNCHES_PER_OPERATION, BlockShape, ModelShape
from paceline.shapes import DecoderShape

CHUNK_LOGITS, CHUNK_TOKENS = 1 << 28, 8192
"""Of one chunk of the loss on a device: about as many logits, and at most as many tokens (`chunked_loss.py`)."""
LOSS_PASSES, EAGER_LOSS_PASSES = 1.0, 8.0
"""Over the logits, a third of all: two reads and a write, in one kernel; and what several kernels do besides."""
EAGER_SAVED = 6
"""Widths that are kept besides where no compiler makes norms and turned features again."""
ROTARY_PASSES = 9
"""Over queries and keys, to turn each pair of features, where no compiler fuses them."""
ROTARY_OPERATIONS = 22
GATE_PASSES = 2
"""Over the features of a gated feed-forward part, beside those of a plain one."""


def decoder_blocks(sizes: DecoderShape, length: int) -> tuple[BlockShape, ...]:
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
            # queries and keys only after they are turned; two norms, in and out; nothing is dropped
            saved_whole_elements=4.0 * length * sizes.width,
            eager_saved_elements=length * (EAGER_SAVED * sizes.width + sizes.ffn * gated),
        ),
        replace(
            head,
            params=sizes.width + (0 if sizes.tied else sizes.vocab * sizes.width),
            moved_elements=LOSS_PASSES * length * sizes.vocab,
            eager_elements=EAGER_LOSS_PASSES * length * sizes.vocab,
            saved_whole_elements=3.0 * length * sizes.width,  # the last norm, in and out, and a gradient
            most_logits=float(min(CHUNK_TOKENS, CHUNK_LOGITS // sizes.vocab) * sizes.vocab),
            loss_params=float(sizes.vocab * sizes.width),
        ),
    )
