"""A modern decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a tied or an untied head.

It runs whole or as a stage of a pipeline: `tokens`, `norm` and `head` may be set to None and layers deleted, and what
is left takes hidden states and gives hidden states. Nothing in it knows of ranks. The number of heads and the length of
a sequence are read from what the projections give, which under tensor parallelism is a part of the whole.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.workloads.chunked_loss import chunked_losses
from paceline.workloads.shapes import DecoderShape

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
HALF = (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim, self.rotary = shape.head_dim, shape.positions == "rotary"
        self.q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)))
        if self.rotary:
            cos_Sd, sin_Sd = rotary_tables(q.shape[1], self.head_dim, q.device, q.dtype)
            q, k = rotate(q, cos_Sd, sin_Sd), rotate(k, cos_Sd, sin_Sd)
        return self.out(causal_attention(q, k, v).flatten(-2))


def causal_attention(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> Tensor:
    """Attention to oneself and what came before; each key and value serves heads / kv_heads queries."""
    grouped = q_BSHd.shape[2] != k_BSKd.shape[2]
    if grouped and q_BSHd.is_cuda and q_BSHd.dtype not in HALF:  # the fused kernels for fp32 want as many keys
        shared = q_BSHd.shape[2] // k_BSKd.shape[2]
        k_BSKd, v_BSKd = (x.repeat_interleave(shared, dim=2) for x in (k_BSKd, v_BSKd))
        grouped = False
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSKd, v_BSKd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each position and pair of features. Cheap beside the projections, so nothing is kept."""
    wide = torch.promote_types(dtype, torch.float32)
    pairs_d = torch.arange(0, head_dim, 2, device=device, dtype=wide)
    speeds_d = torch.exp(pairs_d * (-math.log(ROTARY_BASE) / head_dim))
    angles_Sd = torch.outer(torch.arange(length, device=device, dtype=wide), speeds_d)
    return angles_Sd.cos(), angles_Sd.sin()


def rotate(x_BSHd: Tensor, cos_Sd: Tensor, sin_Sd: Tensor) -> Tensor:
    """Turn each pair (feature i, feature i + half) by the angle of its position."""
    left, right = x_BSHd.chunk(2, dim=-1)
    cos, sin = cos_Sd[:, None, :], sin_Sd[:, None, :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x_BSHd.dtype)


class FeedForward(nn.Module):
    """SwiGLU; without a gate, GELU."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        gated = shape.ffn_kind == "swiglu"
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False) if gated else None
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSD)))
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.ffn = FeedForward(shape)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Head(nn.Module):
    """From hidden states to losses, or to logits where there are no targets. A tied one is handed its weight."""

    def __init__(self, vocab: int, width: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, width))
        self.losses: Callable[[Tensor, Tensor, Tensor], Tensor] = chunked_losses

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        weight_VD = self.weight if weight is None else weight
        assert weight_VD is not None, "a tied head needs the weight of the embedding"
        if targets_BS is None:
            return F.linear(x_BSD, weight_VD)
        return self.losses(x_BSD, weight_VD, targets_BS)


class Decoder(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens: nn.Embedding | None = nn.Embedding(shape.vocab, shape.width)
        learned = shape.positions == "learned"
        self.positions: nn.Embedding | None = nn.Embedding(shape.context, shape.width) if learned else None
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.head: Head | None = Head(shape.vocab, shape.width, shape.tied)
        self.initialise()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """`x` is token ids (B, S), or hidden states (B, S, D) on a stage without `tokens`.

        Returns hidden states on a stage without `head`; else losses summed per sample (B,), where `targets` (B, S)
        below 0 do not count; else, without targets, logits (B, S, V).
        """
        x = self.hidden(x)
        return x if self.head is None else self.head(x, targets, self.shared_weight())

    def hidden(self, x: Tensor) -> Tensor:
        """What goes into the head."""
        if self.tokens is not None:
            ids_BS, x = x, self.tokens(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
            if self.shape.tied:
                x = x * math.sqrt(self.shape.width)  # small numbers suit the head, the stream needs ordinary ones
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None else self.norm(x)

    def shared_weight(self) -> Tensor | None:
        """The weight that a tied head takes from the embedding."""
        return self.tokens.weight if self.shape.tied and self.tokens is not None else None

    def stage(self, layers: range) -> Decoder:
        """The part with these layers, and what comes before the first and after the last; names stay as they are."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):  # modules, weights and hooks are the stage's own
                part.__dict__[name] = value.copy()
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        if layers.start > 0:
            part.tokens = part.positions = None
        if layers.stop < self.shape.layers:
            part.norm = part.head = None
        return part

    @torch.no_grad()
    def initialise(self, seed: int | None = None) -> None:
        """Draw the weights; after `to_empty` once more. What is added to the stream starts small.

        Each weight has a random stream of its own, by its name: a stage, a shard and the whole model draw the same.
        """
        seed = torch.initial_seed() if seed is None else seed
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
            whole = torch.empty(parameter.shape, device="cpu")  # the numbers of a core, whatever the device
            whole.normal_(std=self._std(name, parameter.shape[1]), generator=generator)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None))
            else:
                parameter.copy_(whole)

    def _std(self, name: str, features: int) -> float:
        std = 1 / math.sqrt(features)
        if name.startswith(("tokens.", "positions.")):
            return 0.5 * std if self.shape.tied else 1.0
        if name.startswith("head."):
            return 0.3 * std
        return std / math.sqrt(2 * self.shape.layers) if name.endswith((".out.weight", ".down.weight")) else std

    def costs(self, sequence: int) -> tuple[float, list[float], float]:
        """FLOPs per token, forward and backward, of (the embedding, each layer of the whole model, the head)."""
        shape = self.shape
        attention = 2 * sequence * shape.width  # scores and their sum, of which the causal half is computed
        layer = 3.0 * (2 * shape.weights_per_layer + attention)
        return 3.0 * shape.width, [layer] * shape.layers, 6.0 * shape.vocab * shape.width
