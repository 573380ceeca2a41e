"""The sizes of a decoder, and presets by name."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError

MAX_DIVISOR = 100_000


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that determine a decoder's weights."""

    vocab: int
    width: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int
    context: int  # rows of the table of learned positions
    tied: bool = False
    positions: str = "rotary"
    ffn_kind: str = "swiglu"
    experts: int = 0
    top_k: int = 2
    shared_ffn: int = 0
    balance_by: str = "loss"

    @classmethod
    def of(cls, preset: str, given: Mapping[str, Any], vocab: int, sequence: int) -> "DecoderShape":
        """Lay the given sizes over a preset, for data of `vocab` tokens in samples of `sequence`."""
        sizes = {**PRESETS[preset], **given}
        if missing := [f"model.{name}" for name in ("width", "heads", "layers") if name not in sizes]:
            others = ", ".join(name for name in PRESETS if name != preset)
            message = f"model.preset={preset} needs {' and '.join(missing)} too; or take one of {others}"
            raise UserError(message, code="missing-value", key=missing[0])
        sizes.setdefault("kv_heads", sizes["heads"])
        sizes.setdefault("ffn", -(-8 * sizes["width"] // 3 // 64) * 64)
        shape = cls(**{"vocab": vocab, "context": sequence, **sizes})
        shape._check_divisibility(vocab, sequence)
        return shape

    def _check_divisibility(self, vocab: int, sequence: int) -> None:
        step = 2 if self.positions == "rotary" else 1  # rotary positions turn pairs of features
        if self.width % (self.heads * step):
            wrong = "does not divide" if self.width % self.heads else "leaves an odd number of features per head of"
            fits = [] if self.width % step else find_divisors(self.width // step)
            near = _suggest_nearest(self.heads, fits)
            raise _conflict("model.heads", f"model.heads={self.heads} {wrong} model.width={self.width}{near}")
        if self.heads % self.kv_heads:
            near = _suggest_nearest(self.kv_heads, find_divisors(self.heads))
            problem = f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}{near}"
            raise _conflict("model.kv_heads", problem)
        if self.experts and self.top_k > self.experts:
            more = f"model.top_k={self.top_k} is more than model.experts={self.experts}"
            raise _conflict("model.top_k", f"{more}; type  model.top_k={self.experts}")
        if self.experts and self.ffn_kind != "swiglu":
            raise _conflict("model.ffn_kind", "model.experts are gated; type  model.ffn_kind=swiglu")
        for name, value in (("shared_ffn", self.shared_ffn), ("balance_by", self.balance_by)):
            if value not in (0, "loss") and not self.experts:
                raise _conflict("model.experts", f"model.{name}={value} needs model.experts; type  model.experts=8")
        if vocab > self.vocab:
            few = f"model.vocab={self.vocab} is fewer than the {vocab} tokens of the data"
            raise _conflict("model.vocab", f"{few}; type  model.vocab={vocab}  or a smaller  data.vocab")
        if self.positions == "learned" and sequence > self.context:
            long = f"data.sequence={sequence} is longer than the {self.context} learned positions; "
            raise _conflict("data.sequence", f"{long}type  data.sequence={self.context}  or  model.context={sequence}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def weights_per_layer(self) -> int:
        """Count the matrices; the two norms add 2 × width."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.ffn_kind == "swiglu" else 2) * self.width * self.ffn + self.mixture_weights

    @property
    def mixture_weights(self) -> int:
        """Count what a layer has beyond one feed-forward part: other experts, the router, what all tokens pass."""
        if not self.experts:
            return 0
        return self.width * (3 * self.ffn * (self.experts - 1) + 3 * self.shared_ffn + self.experts)

    @property
    def parameters(self) -> int:
        tables = self.vocab * self.width * (1 if self.tied else 2)
        if self.positions == "learned":
            tables += self.context * self.width
        return tables + self.layers * (self.weights_per_layer + 2 * self.width) + self.width


def _conflict(key: str, message: str) -> UserError:
    return UserError(message, code="invalid-value", key=key)


def find_divisors(number: int) -> list[int]:
    """Return the divisors of a number; of a very large one, the small and the large ones."""
    small = [d for d in range(1, min(math.isqrt(number), MAX_DIVISOR) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _suggest_nearest(given: int, fits: list[int]) -> str:
    return f"; try {min(fits, key=lambda fit: abs(fit - given))}" if fits else "; model.width must be even"


PRESETS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("decoder_presets.json").read_text(encoding="utf-8")
)
"""Sizes by `model.preset`: gpt2, 1b, 3b, 7b and 13b are GPT-2 124M (but for its biases), TinyLlama, OpenLLaMA 3B, Llama
2 7B and 13B; 8b, 70b and 405b are Llama 3.1."""
