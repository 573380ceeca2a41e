"""A modern decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a tied or an untied head.

It runs whole or as a stage of a pipeline: if not `first` it takes hidden states, without `head` it returns them.
Under tensor parallelism the outputs of the projections are a part of the whole: sizes are read from them.
"""

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
from paceline.nn.experts import Experts
from paceline.nn.keyed_dropout import PASS
from paceline.parallel.context import ContextGroup
from paceline.parallel.parameters import copy_whole
from paceline.workloads.lm.standalone import FeedForward

NORM_EPS = 1e-5
DRAW_THREADS = 4  # more weights at once would need much host memory if many ranks draw


class Norm(nn.RMSNorm):
    """RMSNorm whose weight takes the type of the stream; the mean square is computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def find_places(tokens: int, device: torch.device, context: ContextGroup | None) -> Tensor | slice:
    """Return the places of so many tokens in their sequence, of which they may be this rank's part."""
    return slice(tokens) if context is None else context.positions(tokens, device)


class DecoderAttention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, self.head_dim = shape.width, shape.head_dim
        queries, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(width, queries, bias=False)
        self.k, self.v = (nn.Linear(width, values, bias=False) for _ in range(2))
        self.out = nn.Linear(queries, width, bias=False)
        self.context: ContextGroup | None = None

    def forward(self, x_BSD: Tensor, *, tables: RotaryTables | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)))
        if tables is not None:
            places = find_places(q.shape[1], q.device, self.context)
            cos_Sd, sin_Sd = (table[places] for table in tables)
            q, k = rotate(q, cos_Sd, sin_Sd), rotate(k, cos_Sd, sin_Sd)
        attend = causal_attention if self.context is None else self.context.attend
        return self.out(attend(q, k, v).flatten(-2))


class Mixture(nn.Module):
    """Experts, of which a token passes those that its router scores highest; no token is dropped."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.width, shape.ffn)
        self.shared = FeedForward(shape.width, shape.shared_ffn, gated=True) if shape.shared_ffn else None
        self.context: ContextGroup | None = None

    def forward(self, x_BSD: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (the output, and in training how unbalanced the experts are for each token, or its choice by bias)."""
        scores_BSE = self.router(x_BSD).float().softmax(-1)
        chosen_BSk = (scores_BSE if bias_E is None else scores_BSE + bias_E).topk(self.top_k, -1).indices
        top_BSk = scores_BSE.gather(-1, chosen_BSk)
        weights_BSk = top_BSk / top_BSk.sum(-1, keepdim=True)
        given = (part.flatten(0, 1) for part in (x_BSD, chosen_BSk, weights_BSk.to(x_BSD.dtype)))
        shared = self.shared
        beside = None if shared is None else lambda: shared(x_BSD).flatten(0, 1)
        out_BSD = self.experts(*given, beside).view_as(x_BSD)
        if not self.training:
            return out_BSD, None
        return out_BSD, self._imbalance(scores_BSE, chosen_BSk) if bias_E is None else chosen_BSk

    def _imbalance(self, scores_BSE: Tensor, chosen_BSk: Tensor) -> Tensor:
        """Return the share of each expert in its sequence times the token's scores: 1 if balanced (Switch, DeepSeek).

        Sequences are balanced one by one, so that the loss does not depend on what else is in a batch.
        """
        experts = scores_BSE.shape[-1]
        load_BE = scores_BSE.new_zeros(len(scores_BSE), experts)
        load_BE.scatter_add_(1, chosen_BSk.flatten(1), torch.ones_like(chosen_BSk.flatten(1), dtype=load_BE.dtype))
        if self.context is not None:
            load_BE = self.context.sum({"load": load_BE}, load_BE.device)["load"]
        share_BE = load_BE / load_BE.sum(1, keepdim=True)
        return experts * (scores_BSE * share_BE[:, None]).sum(-1)


class DecoderLayer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, eps=NORM_EPS)
        self.attention = DecoderAttention(shape)
        self.ffn_norm = Norm(shape.width, eps=NORM_EPS)
        gated = shape.ffn_kind == "swiglu"
        self.ffn = Mixture(shape) if shape.experts else FeedForward(shape.width, shape.ffn, gated)

    def forward(
        self, x_BSD: Tensor, tables: RotaryTables | None = None, bias_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream, and what a mixture tells of its experts."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), tables=tables)
        normed_BSD = self.ffn_norm(x_BSD)
        if not isinstance(self.ffn, Mixture):
            return x_BSD + self.ffn(normed_BSD), None
        out_BSD, told = self.ffn(normed_BSD, bias_E)
        return x_BSD + out_BSD, told


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
    def __init__(self, shape: DecoderShape, balance: float = 0.01) -> None:
        super().__init__()
        self.shape, self.balance = shape, balance
        self.expert_bias: Tensor | None
        self.expert_load: Tensor
        by_bias = shape.experts > 0 and shape.balance_by == "bias"
        for name, kept in (("expert_bias", True), ("expert_load", False)):  # rows of all layers, in every stage
            zeros = torch.zeros(shape.layers, shape.experts) if by_bias else None
            self.register_buffer(name, zeros, persistent=kept)
        self.tokens: nn.Embedding | None = nn.Embedding(shape.vocab, shape.width)
        learned = shape.positions == "learned"
        self.positions: nn.Embedding | None = nn.Embedding(shape.context, shape.width) if learned else None
        self.layers = nn.ModuleDict({str(i): DecoderLayer(shape) for i in range(shape.layers)})
        self.norm: Norm | None = Norm(shape.width, eps=NORM_EPS)
        self.head: Head | None = Head(shape.vocab, shape.width, shape.tied)
        self.context: ContextGroup | None = None
        self.first = True  # whether it begins with tokens
        self._tables: RotaryTables | None = None
        self.initialise()

    def forward(
        self, x: Tensor, imbalance_BS: Tensor | None = None, *, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return losses summed per sample (B,) of token ids (B, S); `targets` (B, S) below 0 do not count.

        Without targets return logits (B, S, V); see above for the inputs and outputs of a stage. Experts that are
        unbalanced add to the losses in training, and a stage passes on by how much.
        """
        x, found_BS = self.run_layers(x, targets)
        imbalance_BS = found_BS if imbalance_BS is None else imbalance_BS + (0.0 if found_BS is None else found_BS)
        if self.head is None:
            return x if imbalance_BS is None else (x, imbalance_BS)
        found = self.head(x, targets, self.shared_weight())
        if imbalance_BS is None or targets is None:
            return found
        return found + self.balance / self.shape.layers * (imbalance_BS * (targets >= 0)).sum(1)

    def run_layers(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.first and self.tokens is not None:
            ids_BS, x = x, self.tokens(x)
            if self.positions is not None:
                places = find_places(ids_BS.shape[1], x.device, self.context)
                x = x + self.positions(torch.arange(self.shape.context, device=x.device)[places])
            if self.shape.tied:
                x = x * math.sqrt(self.shape.width)  # the head needs small weights, the stream does not
            kind = x.device.type
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
                x = x.to(torch.bfloat16)  # half the bytes in the residual stream; fp16 lacks the range
        tables, imbalances = self.rotary_tables(x), list[Tensor]()
        for name, layer in self.layers.items():
            if self.expert_bias is None:
                x, imbalance_BS = layer(x, tables)
                imbalances += [] if imbalance_BS is None else [imbalance_BS]
                continue
            x, chosen_BSk = layer(x, tables, self.expert_bias[int(name)])
            if chosen_BSk is not None and targets is not None and PASS.counted and torch.is_grad_enabled():
                counted = (targets >= 0)[..., None].expand_as(chosen_BSk).flatten().to(self.expert_load.dtype)
                self.expert_load[int(name)].scatter_add_(0, chosen_BSk.flatten(), counted)
        x = x if self.norm is None else self.norm(x)
        return x, torch.stack(imbalances).sum(0) if imbalances else None

    def rotary_tables(self, x_BSD: Tensor) -> RotaryTables | None:
        """Return cached tables for the whole context, of which x_BSD may be a part.

        A compiler would compute the angles again for every head of every sample.
        """
        if self.shape.positions != "rotary":
            return None
        length = max(self.shape.context, x_BSD.shape[1] * (1 if self.context is None else self.context.ranks))
        kind = torch.promote_types(x_BSD.dtype, torch.float32)
        made = self._tables
        if made is None or len(made[0]) < length or (made[0].device, made[0].dtype) != (x_BSD.device, kind):
            made = self._tables = build_rotary_tables(length, self.shape.head_dim, x_BSD.device, kind)
        return made

    def shared_weight(self) -> Tensor | None:
        return self.tokens.weight if self.shape.tied and self.tokens is not None else None

    def balance_experts(self, load_LE: Tensor) -> None:
        """Lower the bias of experts that had more than their share of a step's tokens, and raise that of others."""
        share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
        assert self.expert_bias is not None
        self.expert_bias += self.balance * (1 / self.shape.experts - share_LE).to(self.expert_bias.dtype)
        self.expert_load.zero_()

    def stage(self, layers: range) -> "Decoder":
        """Return the part with these layers, and with embedding or head at the ends; names stay the same."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):  # modules, weights and hooks are the stage's own
                part.__dict__[name] = value.copy()
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        if layers.start > 0:
            part.first, part.positions = False, None
            if not (self.shape.tied and layers.stop == self.shape.layers):
                part.tokens = None
        if layers.stop < self.shape.layers:
            part.norm = part.head = None
        return part

    @torch.no_grad()
    def initialise(self, seed: int | None = None) -> None:
        """Draw the weights, each from a random stream of its name: a stage, a shard and the whole draw the same."""
        seed = torch.initial_seed() if seed is None else seed
        for buffer in self.buffers():
            if not buffer.is_meta:
                buffer.zero_()
        named = [(name, p) for name, p in self.named_parameters() if not p.is_meta]
        with ThreadPoolExecutor(DRAW_THREADS) as pool:
            for begin in range(0, len(named), DRAW_THREADS):
                some = named[begin : begin + DRAW_THREADS]
                drawn = pool.map(lambda item: self._draw_weight(item[0], item[1], seed), some)
                for (_, parameter), whole in zip(some, drawn, strict=True):
                    copy_whole(parameter, whole)

    def _draw_weight(self, name: str, parameter: Tensor, seed: int) -> Tensor:
        whole = torch.empty(parameter.shape, device="cpu")
        if parameter.ndim == 1:
            return whole.fill_(1.0)
        generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        return whole.normal_(std=self._choose_std(name, parameter.shape[-1]), generator=generator)

    def _choose_std(self, name: str, features: int) -> float:
        std = 1 / math.sqrt(features)
        if name.startswith(("tokens.", "positions.")):
            return 0.5 * std if self.shape.tied else 1.0
        if name.startswith("head."):
            return 0.3 * std
        if name.endswith((".out.weight", ".down.weight", ".down_proj")):
            return std / math.sqrt(2 * self.shape.layers)
        return std

    def costs(self, sequence: int) -> tuple[float, list[float], float]:
        """Return FLOPs per token, forward and backward, of (the embedding, each layer of the whole model, the head)."""
        shape = self.shape
        attention = 2 * sequence * shape.width  # scores and their sum, of which the causal half is computed
        passed = 3 * shape.width * shape.ffn * (shape.experts - shape.top_k) if shape.experts else 0
        layer = 3.0 * (2 * (shape.weights_per_layer - passed) + attention)
        return 3.0 * shape.width, [layer] * shape.layers, 6.0 * shape.vocab * shape.width
