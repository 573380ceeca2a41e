"""A modern decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a tied or an untied head.

It runs whole or as a stage of a pipeline: without `tokens` it takes hidden states, without `head` it returns them.
Under tensor parallelism the outputs of the projections are a part of the whole: sizes are read from them.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.decoder_shape import DecoderShape
from paceline.nn.attention import RotaryTables, build_rotary_tables, causal_attention, rotate
from paceline.nn.chunked_loss import compute_chunked_losses
from paceline.parallel.parameters import copy_whole

NORM_EPS = 1e-5
DRAW_THREADS = 4  # more weights at once would need much host memory if many ranks draw


class Norm(nn.RMSNorm):
    """RMSNorm whose weight takes the type of the stream; the mean square is computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DecoderAttention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, self.head_dim = shape.width, shape.head_dim
        queries, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(width, queries, bias=False)
        self.k, self.v = (nn.Linear(width, values, bias=False) for _ in range(2))
        self.out = nn.Linear(queries, width, bias=False)

    def forward(self, x_BSD: Tensor, *, tables: RotaryTables | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)))
        if tables is not None:
            cos_Sd, sin_Sd = (table[: q.shape[1]] for table in tables)
            q, k = rotate(q, cos_Sd, sin_Sd), rotate(k, cos_Sd, sin_Sd)
        return self.out(causal_attention(q, k, v).flatten(-2))


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


class DecoderLayer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, eps=NORM_EPS)
        self.attention = DecoderAttention(shape)
        self.ffn_norm = Norm(shape.width, eps=NORM_EPS)
        self.ffn = FeedForward(shape)

    def forward(self, x_BSD: Tensor, tables: RotaryTables | None = None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), tables=tables)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Head(nn.Module):
    """From hidden states to losses, or to logits without targets. A tied one is passed its weight."""

    def __init__(self, vocab: int, width: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, width))
        self.losses: Callable[[Tensor, Tensor, Tensor], Tensor] = compute_chunked_losses

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
        self.layers = nn.ModuleDict({str(i): DecoderLayer(shape) for i in range(shape.layers)})
        self.norm: Norm | None = Norm(shape.width, eps=NORM_EPS)
        self.head: Head | None = Head(shape.vocab, shape.width, shape.tied)
        self._tables: RotaryTables | None = None
        self.initialise()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return losses summed per sample (B,) of token ids (B, S); `targets` (B, S) below 0 do not count.

        Without targets return logits (B, S, V); see above for the inputs and outputs of a stage.
        """
        x = self.hidden(x)
        return x if self.head is None else self.head(x, targets, self.shared_weight())

    def hidden(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            ids_BS, x = x, self.tokens(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
            if self.shape.tied:
                x = x * math.sqrt(self.shape.width)  # the head needs small weights, the stream does not
            kind = x.device.type
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
                x = x.to(torch.bfloat16)  # half the bytes in the residual stream; fp16 lacks the range
        tables = self.rotary_tables(x)
        for layer in self.layers.values():
            x = layer(x, tables)
        return x if self.norm is None else self.norm(x)

    def rotary_tables(self, x_BSD: Tensor) -> RotaryTables | None:
        """Return cached tables for the whole context, of which x_BSD may be a part.

        A compiler would compute the angles again for every head of every sample.
        """
        if self.shape.positions != "rotary":
            return None
        length, kind = max(self.shape.context, x_BSD.shape[1]), torch.promote_types(x_BSD.dtype, torch.float32)
        made = self._tables
        if made is None or len(made[0]) < length or (made[0].device, made[0].dtype) != (x_BSD.device, kind):
            made = self._tables = build_rotary_tables(length, self.shape.head_dim, x_BSD.device, kind)
        return made

    def shared_weight(self) -> Tensor | None:
        return self.tokens.weight if self.shape.tied and self.tokens is not None else None

    def stage(self, layers: range) -> Decoder:
        """Return the part with these layers, and with embedding or head at the ends; names stay the same."""
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
        """Draw the weights, each from a random stream of its name: a stage, a shard and the whole draw the same."""
        seed = torch.initial_seed() if seed is None else seed
        named = [(name, p) for name, p in self.named_parameters() if not p.is_meta]
        with ThreadPoolExecutor(DRAW_THREADS) as pool:
            for begin in range(0, len(named), DRAW_THREADS):
                some = named[begin : begin + DRAW_THREADS]
                drawn = pool.map(lambda item: self._draw(item[0], item[1], seed), some)
                for (_, parameter), whole in zip(some, drawn, strict=True):
                    copy_whole(parameter, whole)

    def _draw(self, name: str, parameter: Tensor, seed: int) -> Tensor:
        whole = torch.empty(parameter.shape, device="cpu")
        if parameter.ndim == 1:
            return whole.fill_(1.0)
        generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        return whole.normal_(std=self._std(name, parameter.shape[1]), generator=generator)

    def _std(self, name: str, features: int) -> float:
        std = 1 / math.sqrt(features)
        if name.startswith(("tokens.", "positions.")):
            return 0.5 * std if self.shape.tied else 1.0
        if name.startswith("head."):
            return 0.3 * std
        return std / math.sqrt(2 * self.shape.layers) if name.endswith((".out.weight", ".down.weight")) else std

    def costs(self, sequence: int) -> tuple[float, list[float], float]:
        """Return FLOPs per token, forward and backward, of (the embedding, each layer of the whole model, the head)."""
        shape = self.shape
        attention = 2 * sequence * shape.width  # scores and their sum, of which the causal half is computed
        layer = 3.0 * (2 * shape.weights_per_layer + attention)
        return 3.0 * shape.width, [layer] * shape.layers, 6.0 * shape.vocab * shape.width
