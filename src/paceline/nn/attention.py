"""Causal attention, by the fastest kernel that a device has for it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.bfloat16, torch.float16)
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""On CUDA devices, by measurement (docs/performance.md)."""


def causal_attention(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
    """Attention to oneself and what came before; each key and value serves heads / kv_heads queries."""
    grouped = q_BSHd.shape[2] != k_BSKd.shape[2]
    if grouped and q_BSHd.is_cuda and q_BSHd.dtype not in HALF:  # the fused kernels for fp32 want as many keys
        shared = q_BSHd.shape[2] // k_BSKd.shape[2]
        k_BSKd, v_BSKd = (x.repeat_interleave(shared, dim=2) for x in (k_BSKd, v_BSKd))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSKd, v_BSKd))
    with sdpa_kernel(FASTEST_FIRST, set_priority=True) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
