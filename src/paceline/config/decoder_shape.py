"""The sizes of a decoder, and presets by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError, reject_value


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
        """Return the shape of a preset with the given sizes, for data of `vocab` tokens in samples of `sequence`."""
        sizes = {**PRESETS[preset], **given}
        if missing := [f"model.{name}" for name in ("width", "heads", "layers") if name not in sizes]:
            others = ", ".join(name for name in PRESETS if name != preset)
            raise reject_value(
                "model.preset", preset, f"needs {' and '.join(missing)}; or take {others}", "missing-value"
            )
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
            raise self._reject("heads", f"{wrong} model.width={self.width}{_suggest_nearest(self.heads, fits)}")
        if self.heads % self.kv_heads:
            near = _suggest_nearest(self.kv_heads, find_divisors(self.heads))
            raise self._reject("kv_heads", f"does not divide model.heads={self.heads}{near}")
        if self.experts and self.top_k > self.experts:
            raise self._reject("top_k", f"there are {self.experts} experts; type  model.top_k={self.experts}")
        if self.experts and self.ffn_kind != "swiglu":
            raise self._reject("ffn_kind", "experts are gated; type  model.ffn_kind=swiglu")
        for name in ("shared_ffn", "balance_by"):
            if getattr(self, name) not in (0, "loss") and not self.experts:
                raise self._reject(name, "needs model.experts; type  model.experts=8")
        if vocab > self.vocab:
            raise self._reject("vocab", f"the data have {vocab} tokens; type  model.vocab={vocab}")
        if self.positions == "learned" and sequence > self.context:
            hint = f"there are {self.context} learned positions; type  model.context={sequence}"
            raise reject_value("data.sequence", sequence, hint, "invalid-value")

    def _reject(self, name: str, reason: str) -> UserError:
        return reject_value(f"model.{name}", getattr(self, name), reason, "invalid-value")

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


def find_divisors(number: int) -> list[int]:
    """Return the divisors of a number, up to 1024."""
    return [divisor for divisor in range(1, 1025) if number % divisor == 0]


def _suggest_nearest(given: int, fits: list[int]) -> str:
    return f"; try {min(fits, key=lambda fit: abs(fit - given))}" if fits else "; model.width must be even"


PRESETS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("decoder_presets.json").read_text(encoding="utf-8")
)
"""Sizes by `model.preset`: gpt2, 1b, 3b, 7b and 13b are GPT-2 124M (but for its biases), TinyLlama, OpenLLaMA 3B, Llama
2 7B and 13B; 8b, 70b and 405b are Llama 3.1."""
