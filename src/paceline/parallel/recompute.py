"""Activation checkpointing: what the backward pass needs is computed again instead of kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KEPT = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""What `selective` keeps: products cost most to compute again, everything between them almost nothing."""


def recompute(blocks: Sequence[nn.Module], how: str) -> None:
    """Let each block keep its input alone (full) or its products (selective); the names of its weights stay."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        ops = [getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, ops)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)
