"""Attention: causal with rotary positions, and within texts that lie end to end in one row of tokens."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import register_dataclass

ROTARY_BASE = 10_000.0
HALF = (torch.bfloat16, torch.float16)
FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
FASTEST_FIRST += [SDPBackend.MATH]  # on CUDA devices, by measurement (docs/performance.md)

RotaryTables = tuple[Tensor, Tensor]


def causal_attention(
    q_BSHd: Tensor,
    k_BSKd: Tensor,
    v_BSKd: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention, causal without a mask; with more keys than queries, the last query sees all of them.

    Each key and value serves heads / kv_heads queries.
    """
    grouped = q_BSHd.shape[2] != k_BSKd.shape[2]
    # the fused kernels want as many keys in fp32, and beside a mask
    if grouped and (mask is not None or (q_BSHd.is_cuda and q_BSHd.dtype not in HALF)):
        shared = q_BSHd.shape[2] // k_BSKd.shape[2]
        k_BSKd, v_BSKd = (x.repeat_interleave(shared, dim=2) for x in (k_BSKd, v_BSKd))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSKd, v_BSKd))
    causal = mask is None and q.shape[2] == k.shape[2]
    if mask is None and not causal:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[2], k.shape[2])
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    with sdpa_kernel(FASTEST_FIRST, set_priority=True) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **options).transpose(1, 2)


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


BLOCK = 256  # padded batches have multiples of this many tokens


@dataclass(frozen=True)
class Packed:
    tokens: Tensor  # (T,) text after text
    positions: Tensor  # (T,) of each token in its text
    texts: Tensor  # (T,) which text each token belongs to
    bounds: Tensor  # (B + 1,) where texts begin and end, int32
    labels: Tensor  # (B,) class of each text; -100 for padding
    keys: Tensor  # (B,) the random number of each text
    runs: tuple[tuple[int, int], ...]  # (how many, length) of neighbours of equal length
    longest: int


register_dataclass(Packed)


def pack_texts(tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray, keys: np.ndarray) -> Packed:
    """Lay texts end to end; best sorted by length, so that equal ones are neighbours."""
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    return Packed(
        tokens=torch.from_numpy(tokens.astype(np.int64, copy=False)),
        positions=torch.from_numpy(np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths)),
        texts=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        labels=torch.from_numpy(labels.astype(np.int64, copy=False)),
        keys=torch.from_numpy(keys),
        runs=tuple((b - a, int(lengths[a])) for a, b in pairwise(edges)),
        longest=int(lengths.max()),
    )


def pack_padded(
    tokens: np.ndarray,
    lengths: list[np.ndarray],
    labels: list[np.ndarray],
    keys: list[np.ndarray],
    most: int,
    longest: int,
) -> list[Packed]:
    """Pack several batches, each padded to `most` + 1 texts and a multiple of BLOCK tokens, so that shapes are few."""
    texts = most + 1
    filled = [_with_padding(own, texts - len(own)) for own in lengths]
    every = np.concatenate(filled)
    ends = np.cumsum(every)
    real = np.concatenate([np.arange(texts) < len(own) for own in lengths])
    row = np.zeros(int(ends[-1]), np.int32)
    row[np.repeat(real, every)] = tokens
    positions = (np.arange(len(row), dtype=np.int32) - np.repeat((ends - every).astype(np.int32), every)) % longest
    which = np.repeat(np.tile(np.arange(texts, dtype=np.int32), len(lengths)), every)
    out, begin = [], 0
    for own, label, key in zip(filled, labels, keys, strict=True):
        mine, spare = slice(begin, begin + int(own.sum())), texts - len(label)
        begin = mine.stop
        out.append(
            Packed(
                tokens=torch.from_numpy(row[mine]),
                positions=torch.from_numpy(positions[mine]),
                texts=torch.from_numpy(which[mine]),
                bounds=torch.from_numpy(np.concatenate([[0], np.cumsum(own)]).astype(np.int32)),
                labels=torch.from_numpy(np.concatenate([label, np.full(spare, -100)])),
                keys=torch.from_numpy(np.concatenate([key, np.zeros(spare, np.int64)])),
                runs=(),
                longest=max(longest, BLOCK),
            )
        )
    return out


def _with_padding(lengths: np.ndarray, spare: int) -> np.ndarray:
    used = int(lengths.sum())
    extra = -(used + spare) % BLOCK + spare
    return np.concatenate([lengths, np.diff(np.arange(spare + 1) * extra // spare)])


def compute_packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Compute attention within each text; q, k, v are (T, heads, head width)."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        # what torch.nn.attention.varlen calls, without its wrapper, which imports the compiler for seconds
        ends, longest = packed.bounds, packed.longest
        return torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, longest, longest, 0.0, False, False)[0]
    sizes = [count * length for count, length in packed.runs]
    out = []
    for (count, length), *parts in zip(packed.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        shaped = [part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts]
        out.append(F.scaled_dot_product_attention(*shaped).transpose(1, 2).reshape(count * length, *q.shape[1:]))
    return torch.cat(out)


def average_texts(x: Tensor, packed: Packed) -> Tensor:
    """Average over the tokens of each text: (T, features) -> (B, features)."""
    if packed.runs:
        parts = x.split([count * length for count, length in packed.runs])
        return torch.cat([p.view(c, n, -1).mean(1) for p, (c, n) in zip(parts, packed.runs, strict=True)])
    lengths = torch.diff(packed.bounds).to(x.dtype)
    member = packed.texts == torch.arange(len(packed.labels), device=x.device)[:, None]
    return (member.to(x.dtype) @ x) / lengths[:, None]


def hash32(x: Tensor) -> Tensor:
    """Return a 32-bit hash of each element (the murmur3 finaliser), in int32."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -0x7A143595
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -0x3D4D51CB
    x = x ^ ((x >> 16) & 0xFFFF)
    # compiled for a device, ranges of lengths that vary are computed in 64 bits, whatever their type
    return x.to(torch.int64).to(torch.int32) if x.is_cuda and torch.compiler.is_compiling() else x


def derive_token_keys(packed: Packed, site: int) -> Tensor:
    """Return a random number (T,) for each token at one site of the model, a function of its text's key."""
    keys = packed.keys[packed.texts] + packed.positions.long() * 0x9E3779B1 + (site + 1) * 0x85EBCA77
    return hash32((keys & 0xFFFFFFFF).to(torch.int32))


def drop_tokens(packed: Packed, p: float, site: int, replacement: int) -> Tensor:
    hit = derive_token_keys(packed, site) < int((p - 0.5) * 2**32)
    return torch.where(hit, replacement, packed.tokens)


def drop_features(x: Tensor, p: float, packed: Packed, site: int) -> Tensor:
    """Apply dropout drawn from each text's key: the same on any layout, and after a restart."""
    columns = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32) * -0x61C88647
    noise = hash32(derive_token_keys(packed, site)[:, None] + columns)
    return torch.where(noise < int((p - 0.5) * 2**32), 0, x * (1 / (1 - p)))
