"""A language model that was trained with Paceline, and does not need it: torch, tokenizers and safetensors do.

    from load import load
    model = load()               # of the folder that this file is in
    model.write("Returns the")   # the prompt and what follows; model(ids) gives logits (B, S, vocabulary)

python load.py "Returns the"
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU; without a gate, GELU."""

    def __init__(self, width: int, ffn: int, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False) if gated else None
        self.up, self.down = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ExportedBlock(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["width"]
        self.heads, self.size = config["heads"], width // config["heads"]
        kv_width = config["kv_heads"] * self.size
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        shapes = {"q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "out": (width, width)}
        self.attention = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        gated = config["ffn_kind"] == "swiglu"
        self.ffn = ExportedMixture(config) if config.get("experts") else FeedForward(width, config["ffn"], gated)

    def forward(self, x: Tensor, angles: Tensor | None, bias: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (self.attention[name](normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for name in "qkv")
        if angles is not None:
            q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
        k, v = (part.repeat_interleave(self.heads // part.shape[1], dim=1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["out"](seen.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + (self.ffn(normed) if bias is None else self.ffn(normed, bias))


class ExportedMixture(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, ffn, self.top_k = config["width"], config["ffn"], config["top_k"]
        self.router = nn.Linear(width, config["experts"], bias=False)
        self.experts = nn.ParameterDict()
        self.experts["gate_up_proj"] = nn.Parameter(torch.zeros(config["experts"], 2 * ffn, width))
        self.experts["down_proj"] = nn.Parameter(torch.zeros(config["experts"], width, ffn))
        self.shared = FeedForward(width, config["shared_ffn"], True) if config["shared_ffn"] else None

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        every = self.router(x).float().softmax(-1)
        chosen = (every + bias).topk(self.top_k, -1).indices
        scores = every.gather(-1, chosen)
        weights = torch.zeros(*x.shape[:-1], self.router.out_features, dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, (scores / scores.sum(-1, keepdim=True)).to(x.dtype))
        gate, up = torch.einsum("bsd,efd->bsef", x, self.experts["gate_up_proj"]).chunk(2, -1)
        found = torch.einsum("bsef,edf->bsed", F.silu(gate) * up, self.experts["down_proj"])
        out = (found * weights[..., None]).sum(-2)
        return out if self.shared is None else out + self.shared(x)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair (feature i, feature i + half) by the angle of its position."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class ExportedDecoder(nn.Module):
    """Logits (B, S, vocabulary) of token ids (B, S)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, width = config, config["width"]
        self.tokenizer: Any = None
        self.tokens = nn.Embedding(config["vocab"], width)
        self.positions = nn.Embedding(config["context"], width) if config["positions"] == "learned" else None
        self.layers = nn.ModuleList(ExportedBlock(config) for _ in range(config["layers"]))
        self.expert_bias: Tensor | None
        by_bias = config.get("experts") and config.get("balance_by") == "bias"
        self.register_buffer("expert_bias", torch.zeros(config["layers"], config["experts"]) if by_bias else None)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = None if config["tied"] else nn.Linear(width, config["vocab"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, places, angles = self.tokens(ids), torch.arange(ids.shape[1], device=ids.device), None
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            size = self.config["width"] // self.config["heads"]
            speeds = torch.exp(torch.arange(0, size, 2, device=ids.device) * (-math.log(10_000.0) / size))
            angles = torch.outer(places.to(speeds.dtype), speeds)
        x = x * math.sqrt(self.config["width"]) if self.head is None else x
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, None if self.expert_bias is None else self.expert_bias[index])
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def write(
        self, prompt: str, tokens: int = 100, temperature: float = 0.8, top_k: int = 0, seed: int | None = None
    ) -> str:
        """Return the prompt and up to so many more tokens, fewer where the document ends.

        Each is drawn from the `top_k` likeliest, or from all for 0.
        """
        ids = [self.config["end"], *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
        begin, device = len(ids), self.tokens.weight.device
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(tokens):
            given = torch.tensor([ids[-self.config["sequence"] :]], device=device)
            logits = self(given)[0, -1, : self.config["tokens"]].double().cpu() / temperature
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            drawn = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            if drawn == self.config["end"]:
                break
            ids.append(drawn)
        return prompt + str(self.tokenizer.decode(ids[begin:]))


def load(folder: str | Path = Path(__file__).parent) -> ExportedDecoder:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = Path(folder)
    model = ExportedDecoder(json.loads((folder / "config.json").read_text("utf-8")))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
    return model.eval()


if __name__ == "__main__":
    print(load().write(" ".join(sys.argv[1:])))
