"""Texts of different lengths end to end in one row of tokens: no padding, so no work is wasted on it.

Dense layers see (tokens, features) and never learn where a text ends. Attention, pooling and dropout do: they are
here, and give the same numbers however the texts were divided into batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass

BLOCK = 256
"""Sizes that a captured graph is made for are multiples of this many tokens."""


@dataclass(frozen=True)
class Packed:
    tokens: Tensor
    """(T,) token numbers, text after text."""
    positions: Tensor
    """(T,) place of each token in its text."""
    texts: Tensor
    """(T,) which text each token belongs to."""
    bounds: Tensor
    """(B + 1,) where texts begin and end, int32."""
    labels: Tensor
    """(B,) class of each text; -100 for a stand-in that counts nothing."""
    keys: Tensor
    """(B,) the random number of each text."""
    runs: tuple[tuple[int, int], ...]
    """(how many, length) of neighbours of equal length, in order."""
    longest: int

    def filled(self, texts: int, longest: int) -> Packed:
        """The same with a tail that counts nothing, so that only a few different shapes occur."""
        used, spare = len(self.tokens), texts + 1 - len(self.labels)
        assert spare > 0, "a batch cannot be filled to fewer texts than it has"
        size = -(-(used + spare) // BLOCK) * BLOCK
        ends = np.linspace(used, size, spare + 1).astype(np.int64)
        which = np.repeat(np.arange(spare), np.diff(ends))
        places = (np.arange(used, size) - ends[which]) % longest
        return Packed(
            tokens=_longer(self.tokens, np.zeros(size - used, np.int64)),
            positions=_longer(self.positions, places),
            texts=_longer(self.texts, which + len(self.labels)),
            bounds=_longer(self.bounds, ends[1:].astype(np.int32)),
            labels=_longer(self.labels, np.full(spare, -100)),
            keys=_longer(self.keys, np.zeros(spare, np.int64)),
            runs=(),
            longest=max(longest, BLOCK),
        )


def _longer(tensor: Tensor, tail: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([tensor.numpy(), tail]))


register_dataclass(Packed)


def pack(tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray, keys: np.ndarray) -> Packed:
    """Lay texts end to end; best sorted by length, so that equal ones are neighbours."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    change = np.flatnonzero(np.diff(lengths)) + 1
    edges = [0, *change.tolist(), len(lengths)]
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


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Attention within each text; q, k, v are (T, heads, head width)."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, packed.bounds, packed.bounds, packed.longest, packed.longest)
    sizes = [count * length for count, length in packed.runs]
    out = []
    for (count, length), *parts in zip(packed.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        shaped = [part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts]
        out.append(F.scaled_dot_product_attention(*shaped).transpose(1, 2).reshape(count * length, *q.shape[1:]))
    return torch.cat(out)


def mean_of_texts(x: Tensor, packed: Packed) -> Tensor:
    """(T, features) -> (B, features): the mean over the tokens of each text."""
    if packed.runs:
        parts = x.split([count * length for count, length in packed.runs])
        return torch.cat([p.view(c, n, -1).mean(1) for p, (c, n) in zip(parts, packed.runs, strict=True)])
    lengths = torch.diff(packed.bounds).to(x.dtype)
    member = packed.texts == torch.arange(len(packed.labels), device=x.device)[:, None]
    return (member.to(x.dtype) @ x) / lengths[:, None]


def _scramble(x: Tensor) -> Tensor:
    """A 32-bit hash of each element (the murmur3 finaliser), in int32."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -0x7A143595
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def token_keys(packed: Packed, place: int) -> Tensor:
    """(T,) int32: a random number for each token at one place of the model, a function of its text's key."""
    keys = packed.keys[packed.texts] + packed.positions * 0x9E3779B1 + (place + 1) * 0x85EBCA77
    return _scramble((keys & 0xFFFFFFFF).to(torch.int32))


def drop_tokens(packed: Packed, p: float, place: int, instead: int) -> Tensor:
    """The tokens, each replaced with probability p."""
    hit = token_keys(packed, place) < int((p - 0.5) * 2**32)
    return torch.where(hit, instead, packed.tokens)


def drop(x: Tensor, p: float, packed: Packed, place: int) -> Tensor:
    """Dropout drawn from each text's key: the same on any layout, and after a restart."""
    columns = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32) * -0x61C88647
    noise = _scramble(token_keys(packed, place)[:, None] + columns)
    return torch.where(noise < int((p - 0.5) * 2**32), 0, x * (1 / (1 - p)))
