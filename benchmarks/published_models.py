"""The models of published rows: as the row gives them, or as the logs and configurations of its source do.

A row often gives a name only. Shapes of such models are in the source's own repository more often than not; where they
are not, a usual shape of that many parameters is taken.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unknown_shapes import count_params, typical

from paceline.planner.formulas.shape import BlockShape, ModelShape

MASKED = 0.15
"""Of the tokens, those that a masked language model predicts."""
BIN_TOKENS = 64
"""Texts of about equal length are batched together: within so many tokens (LDDL, phase 2)."""
Numbers = Mapping[str, float | None]


@dataclass(frozen=True)
class PublishedShape(ModelShape):
    """A model whose embedding or head differs from a plain one."""

    embedding_params: float = 0.0
    """Where it is not vocabulary times width."""
    predicted: float = 1.0
    """Of the tokens, those whose logits are computed."""

    @functools.cached_property
    def blocks(self) -> tuple[BlockShape, BlockShape, BlockShape]:
        embedding, layer, head = self._build_embedding_block(), self._build_layer_block(), self._build_head_block()
        if self.embedding_params:
            embedding = replace(embedding, params=self.embedding_params)
        logits = (replace(head.matmuls[0], rows=self.predicted * head.matmuls[0].rows),)
        return (
            embedding,
            layer,
            replace(
                head,
                matmuls=logits,
                moved_elements=self.predicted * head.moved_elements,
                saved_split_elements=self.predicted * head.saved_split_elements,
            ),
        )


# Transformer-XL on WikiText-103, which has 267,735 words. NVIDIA's configurations have an adaptive softmax: each token
# meets the first 20,000 words, and the few per cent that are rarer the 20,000, 160,000 or 67,735 after them, in the
# large model at a width of 256, 64 and 16: about the cost of the vocabularies below. Lambda's logs show a plain softmax
# over all words (520 million parameters) and segments of 256 tokens.
KNOWN_SHAPES: dict[str, ModelShape] = {
    "Transformer-XL base": PublishedShape(
        16, 512, 8, 192, 26_500, 2048, memory_len=192, fused_attention=False, embedding_params=137e6
    ),
    "Transformer-XL large": PublishedShape(
        18, 1024, 16, 384, 21_500, 4096, memory_len=384, fused_attention=False, embedding_params=38e6
    ),
    "transformerxllarge": ModelShape(18, 1024, 16, 256, 267_735, 4096, memory_len=256, fused_attention=False),
}
# (layers, width) in the scripts of bigscience's experiments/gpt2-meg, each with 32 heads; they call 24B 25
BIGSCIENCE = {
    "GPT-7.5B": (36, 4096),
    "GPT-18B": (40, 6144),
    "GPT-24B": (40, 7168),
    "GPT-30B": (48, 7168),
    "GPT-39B": (48, 8192),
    "GPT-52B": (64, 8192),
    "GPT-65B": (64, 9216),
    "GPT-116B": (64, 12_288),
    "GPT-206B": (64, 16_384),
}


def model_of(raw: Mapping[str, str], n: Numbers, year: int) -> ModelShape | None:
    """None for what is not a transformer, or says too little about itself."""
    name = raw["model_name"]
    if re.search(r"mixtral|moe|\dx\d+b", name.lower()):
        return None  # experts are not priced yet
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    known = BIGSCIENCE.get(name) if "bigscience experiments/gpt2" in raw["source"] else None
    if known:
        return ModelShape(*known, 32, int(n["seq_len"] or 1024), 50_304, fused_attention=False)
    if not n["hidden"]:
        if re.match(r"(GPT|Llama|Nemotron|GPT3)", name) and n["params_b"]:
            gated = "llama" in name.lower()
            shape = typical(n["params_b"] * 1e9, int(n["seq_len"] or 2048), int(n["vocab"] or 51_200), gated)
            return replace(shape, fused_attention=_fused_attention(raw, year))
        return None
    return _from_sizes(raw, n, year)


def _from_sizes(raw: Mapping[str, str], n: Numbers, year: int) -> ModelShape | None:
    name, hidden = raw["model_name"], int(n["hidden"] or 0)
    encoder = "BERT" in name or "bert" in name
    vocab, seq = int(n["vocab"] or 51_200), int(n["seq_len"] or (2048 if n["measured_peak_mem_gb"] else 0))
    if not seq:
        return None
    nvidia_bert = encoder and "NVIDIA/DeepLearningExamples" in raw["source"]
    if nvidia_bert and "PyTorch" in raw["source"] and seq == 512:
        # half of Wikipedia's 512-token samples is padding (Krell et al. 2021), of which bins leave half a bin
        seq = 256 + BIN_TOKENS // 2
    heads = int(n["heads"] or max(1, hidden // 128))
    layers = int(n["layers"] or round(((n["params_b"] or 0) * 1e9 - vocab * hidden) / (12 * hidden**2)))
    llama = "llama" in name.lower()
    shape = PublishedShape(
        layers,
        hidden,
        heads,
        seq,
        vocab,
        int(n["ffn_hidden"] or 4 * hidden),
        int(n["kv_heads"] or 0),
        gated=llama,
        tied=not llama and "Nemotron" not in name,
        learned_positions=not llama,
        biases=not llama,
        causal=not encoder,
        fused_attention=_fused_attention(raw, year) and not encoder,
        classes=2 if "squad" in name.lower() else 0,
        predicted=MASKED if nvidia_bert and "squad" not in name.lower() else 1.0,
    )
    if not n["kv_heads"] and n["params_b"] and count_params(shape) > 1.05e9 * n["params_b"]:
        shape = replace(shape, kv_heads=min(8, heads))  # too large for its name: keys and values are shared
    return shape


def _fused_attention(raw: Mapping[str, str], year: int) -> bool:
    """Stacks of decoders since 2023 never store the scores; Megatron-DeepSpeed stayed with its old kernels."""
    return year >= 2023 and "Megatron-DeepSpeed" not in raw["notes"]
