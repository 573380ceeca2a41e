"""Causal attention with shared keys and values, and rotary positions."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROTARY_BASE = 10_000.0
HALF = (torch.bfloat16, torch.float16)
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""On CUDA devices, by measurement (docs/performance.md)."""

RotaryTables = tuple[Tensor, Tensor]


def causal_attention(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
    """Compute causal attention; each key and value serves heads / kv_heads queries."""
    grouped = q_BSHd.shape[2] != k_BSKd.shape[2]
    if grouped and q_BSHd.is_cuda and q_BSHd.dtype not in HALF:  # the fused kernels for fp32 want as many keys
        shared = q_BSHd.shape[2] // k_BSKd.shape[2]
        k_BSKd, v_BSKd = (x.repeat_interleave(shared, dim=2) for x in (k_BSKd, v_BSKd))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSKd, v_BSKd))
    with sdpa_kernel(FASTEST_FIRST, set_priority=True) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def build_rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> RotaryTables:
    wide = torch.promote_types(dtype, torch.float32)
    pairs_d = torch.arange(0, head_dim, 2, device=device, dtype=wide)
    speeds_d = torch.exp(pairs_d * (-math.log(ROTARY_BASE) / head_dim))
    angles_Sd = torch.outer(torch.arange(length, device=device, dtype=wide), speeds_d)
    return angles_Sd.cos(), angles_Sd.sin()


def rotate(x_BSHd: Tensor, cos_Sd: Tensor, sin_Sd: Tensor) -> Tensor:
    """Rotate each pair (feature i, feature i + half) by the angle of its position."""
    left, right = x_BSHd.chunk(2, dim=-1)
    cos, sin = cos_Sd[:, None, :], sin_Sd[:, None, :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x_BSHd.dtype)
