"""What others do for a language model on one CUDA device: a hand-tuned loop, and transformers under Accelerate.

Both read the same batches as Paceline does. The hand-tuned model joins projections of one input into one matrix, pads
its vocabulary to a multiple of 64, and is compiled: whole if it has few layers, else layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.config.decoder_shape import DecoderShape

Batches = Iterator[tuple[Tensor, Tensor]]
WHOLE = 12
"""Layers up to which a model is compiled in one piece; compiling takes minutes beyond."""
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


class PlainBlock(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, self.heads, self.rotary = shape.width, shape.heads, shape.positions == "rotary"
        self.gated = shape.ffn_kind == "swiglu"
        self.first, self.second = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, shape.ffn * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        if self.rotary:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.second(x))
        if self.gated:
            gate, up = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(h))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class PlainModel(nn.Module):
    def __init__(self, shape: DecoderShape, sequence: int) -> None:
        super().__init__()
        rows, width = -(-shape.vocab // 64) * 64, shape.width
        self.tokens = nn.Embedding(rows, width)
        self.positions = nn.Embedding(sequence, width) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, rows, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        head = width // shape.heads
        angles = torch.outer(torch.arange(sequence), 10_000.0 ** (-torch.arange(0, head, 2) / head))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)
        if len(self.blocks) > WHOLE:
            for block in self.blocks:
                block.compile()
            self.loss = torch.compile(self.loss)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def _groups(model: nn.Module) -> list[dict]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def hand_tuned(shape: DecoderShape, sequence: int, batches: Batches) -> Callable[[], Tensor]:
    """A step of the loop that people tune by hand: autocast, compiled, fused AdamW, flash attention."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = PlainModel(shape, sequence)
    net = model if shape.layers > WHOLE else torch.compile(model)
    optimizer = torch.optim.AdamW(_groups(model), lr=LR, betas=BETAS, fused=True)

    def step() -> Tensor:
        ids, targets = (t.to("cuda", non_blocking=True) for t in next(batches))
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss = net(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def under_accelerate(shape: DecoderShape, sequence: int, batches: Batches) -> Callable[[], Tensor]:
    """A step of the usual script: a model of transformers, prepared by Accelerate in bf16."""
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(mixed_precision="bf16")
    if shape.positions == "learned":
        sizes = {"n_positions": sequence, "n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        kind, config = GPT2LMHeadModel, GPT2Config(vocab_size=shape.vocab, **sizes, **off)
    else:
        sizes = {"hidden_size": shape.width, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers}
        sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        kind = LlamaForCausalLM
        config = LlamaConfig(
            vocab_size=shape.vocab, max_position_embeddings=sequence, tie_word_embeddings=False, **sizes
        )
    config._attn_implementation, config.use_cache = "sdpa", False
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = kind(config).float().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(_groups(model), lr=LR, betas=BETAS, fused=True))

    def step() -> Tensor:
        ids, _ = (t.to("cuda", non_blocking=True) for t in next(batches))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
