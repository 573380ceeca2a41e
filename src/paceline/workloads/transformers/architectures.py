"""Sizes of a model from its config.json alone, for the usual architectures: no torch, no weights, no memory.

Parameters are counted exactly; tests compare them with the library's own models.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from paceline.errors import UserError

Values = Mapping[str, Any]
Linear = tuple[str, int, int]  # name, inputs, outputs


@dataclass(frozen=True)
class Sizes:
    """Sides of the matrices of a transformer, and the parameters of its parts."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocab: int
    gated: bool
    causal: bool
    linear: tuple[Linear, ...]
    context: int = 0  # positions
    tables: int = 0  # parameters of the embeddings
    layer: int = 0  # parameters of one layer
    final: int = 0  # parameters of the last norm
    pooling: int = 0  # parameters between the last layer and the classes
    tied: bool = False
    class_biases: bool = False
    learned_positions: bool = True
    experts: int = 0
    active: int = 0  # experts that a token passes, each with `ffn` features
    shared_ffn: int = 0  # features of an expert that every token passes
    stepwise_gelu: bool = False  # the activation is written out as seven operations

    def head(self, classes: int) -> int:
        """Count the parameters after the last layer: of a head over `classes` or, for 0, over the vocabulary."""
        if classes:
            return self.final + self.pooling + classes * (self.width + self.class_biases)
        return self.final + (0 if self.tied else self.vocab * self.width)

    def parameters(self, classes: int = 0) -> int:
        return self.tables + self.layers * self.layer + self.head(classes)

    def adapters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Count the parameters of adapters in one layer, at the linear layers so named, or at all."""
        return sum(rank * (inner + outer) for name, inner, outer in self.linear if not targets or name in targets)


def sizes_of(values: Values) -> Sizes | None:
    """Return the sizes that a config describes; None for an architecture that has no formula here."""
    reader = READERS.get(values["model_type"])
    if reader is None:
        return None
    kind = f"config.json of {values['model_type']}"
    try:
        given = {**DEFAULTS.get(values["model_type"], {}), **values}
        sizes = reader({name: value for name, value in given.items() if value is not None})
        if sizes is not None and values["model_type"] not in ANY_WIDTH and sizes.width % sizes.heads:
            raise TypeError(f"a width of {sizes.width} is not a multiple of {sizes.heads} heads")
        if sizes is not None and any(type(n) is float or n < 0 for n in astuple(sizes) if isinstance(n, int | float)):
            raise TypeError("they are not whole numbers")
        return sizes
    except KeyError as missing:
        raise UserError(f"{kind} has no {missing}, so its size is not known", code="invalid-data") from None
    except (TypeError, ZeroDivisionError) as error:
        raise UserError(f"{kind} has invalid sizes: {error}", code="invalid-data") from None


LLAMA_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI3_NAMES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GPT2_NAMES = ("c_attn", "c_proj", "c_fc", "c_proj")
GPT_NEOX_NAMES = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
BERT_NAMES = ("query", "key", "value", "dense", "dense", "dense")
DISTILBERT_NAMES = ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2")


def _read(
    c: Values,
    names: Sequence[str] = LLAMA_NAMES,
    *,
    gated: bool = True,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    norms: int = 2,
    head_norms: bool = False,
) -> Sizes:
    """Read a decoder. `names` are those of its linear layers; queries, keys and values may be one, gate and up too."""
    width, heads, ffn, vocab = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"], c["vocab_size"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_width = c.get("head_dim") or width // heads
    q, kv, up = heads * head_width, kv_heads * head_width, ffn * (1 + gated)
    outer = [q, kv, kv] if len(names) > 4 else [q + 2 * kv]
    *ins, out = names[: len(outer) + 1]
    *ups, down = names[len(outer) + 1 :]
    linear: tuple[Linear, ...] = (
        *((name, width, side) for name, side in zip(ins, outer, strict=True)),
        (out, q, width),
        *((name, width, up // len(ups)) for name in ups),
        (down, ffn, width),
    )
    biases = qkv_bias * (q + 2 * kv) + out_bias * width + mlp_bias * (up + width)
    return Sizes(
        *(c["num_hidden_layers"], width, heads, kv_heads, head_width, ffn, vocab),
        gated=gated,
        causal=True,
        linear=linear,
        context=c.get("max_position_embeddings") or 0,
        tables=vocab * width,
        layer=_weights(linear) + biases + norms * width + 2 * head_width * head_norms,
        final=width * (2 - gated),
        tied=bool(c.get("tie_word_embeddings", False)),
        learned_positions=False,
    )


def _weights(linear: tuple[Linear, ...]) -> int:
    return sum(inner * outer for _, inner, outer in linear)


def _read_llama(c: Values, **more: Any) -> Sizes:
    biased = bool(c.get("attention_bias", False))
    return _read(c, qkv_bias=biased, out_bias=biased, **more)


def _experts(c: Values, attention: Sizes, ffn: str, shared: int = 0) -> Sizes | None:
    """Replace the feed-forward part by experts and a router; None unless all layers have them.

    `ffn` names the features of one, `shared` are those of an expert for all tokens.
    """
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        return None
    width, experts, each = c["hidden_size"], c.get("num_local_experts") or c["num_experts"], c[ffn]
    linear = tuple(one for one in attention.linear if not one[0].endswith(("gate_proj", "up_proj", "down_proj")))
    plain = _weights(attention.linear) - _weights(linear)
    more = 3 * width * shared + width * bool(shared)
    if shared:
        sides = (("gate_proj", width, shared), ("up_proj", width, shared), ("down_proj", shared, width))
        linear = (*linear, *sides, ("shared_expert_gate", width, 1))
    return replace(
        attention,
        ffn=each,
        linear=linear,
        layer=attention.layer - plain + experts * (3 * width * each + width) + more,
        experts=experts,
        active=c["num_experts_per_tok"],
        shared_ffn=shared,
    )


def _olmoe(c: Values) -> Sizes | None:
    found = _read_llama(c)  # queries and keys have a norm over all heads
    norms = found.width + found.width // found.heads * found.kv_heads
    return _experts(c, replace(found, layer=found.layer + norms), "intermediate_size")


def _gemma(c: Values, **more: Any) -> Sizes:
    return replace(_read_llama(c, **more), tied=bool(c.get("tie_word_embeddings", True)))


def _biased(c: Values, names: Sequence[str], attention_bias: bool = True) -> Sizes:
    """Read an architecture of LayerNorm and biases, whose queries, keys and values have as many heads."""
    same = {name: value for name, value in c.items() if name not in ("num_key_value_heads", "head_dim")}
    both = {"qkv_bias": attention_bias, "out_bias": attention_bias}
    return _read(same, names, gated=False, mlp_bias=True, norms=4, **both)


def _gpt2(c: Values) -> Sizes | None:
    if c.get("add_cross_attention"):
        return None
    width, context = c["n_embd"], c["n_positions"]
    sides = {"num_attention_heads": c["n_head"], "num_hidden_layers": c["n_layer"], "hidden_size": width}
    return replace(
        _biased({**c, **sides, "intermediate_size": c.get("n_inner") or 4 * width}, GPT2_NAMES),
        context=context,
        tables=(c["vocab_size"] + context) * width,
        tied=bool(c.get("tie_word_embeddings", True)),
        learned_positions=True,
        stepwise_gelu=c.get("activation_function", "gelu_new") == "gelu_new",
    )


def _bert(c: Values, types: bool = True, names: Sequence[str] = BERT_NAMES) -> Sizes:
    width, context = c["hidden_size"], c["max_position_embeddings"]
    rows = c["vocab_size"] + context + (c.get("type_vocab_size") or 2) * types
    return replace(
        _biased(c, names),
        causal=False,
        tables=rows * width + 2 * width,  # and their norm; the last layer has no norm
        final=0,
        pooling=width * width + width,
        tied=False,
        class_biases=True,
        learned_positions=True,
    )


def _distilbert(c: Values) -> Sizes:
    theirs = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    theirs["intermediate_size"] = "hidden_dim"
    return _bert({**c, **{name: c[other] for name, other in theirs.items()}}, types=False, names=DISTILBERT_NAMES)


BERTS = ("bert", "roberta", "xlm-roberta", "camembert")
CAUSAL = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite"}
CAUSAL |= {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt2", "gpt_neox"}
"""Architectures whose tokens meet in causal attention alone, and that take their places from the caller."""
ANY_WIDTH = CAUSAL - {"llama", "gemma2", "gemma3_text", "gpt2", "gpt_neox"}
"""Architectures whose width need not be a multiple of the number of heads."""
DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256},
}
"""What the library takes for a key that a file leaves out."""
DEFAULT_DROPOUTS = {
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1},
    **{kind: {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1} for kind in BERTS},
    "distilbert": {"attention_dropout": 0.1, "dropout": 0.1},
}
READERS: dict[str, Callable[[Values], Sizes | None]] = {
    "llama": lambda c: _read_llama(c, mlp_bias=bool(c.get("mlp_bias"))),
    "mistral": _read,
    "qwen2": lambda c: _read(c, qkv_bias=True),
    "qwen3": lambda c: _read_llama(c, head_norms=True),
    "gemma": _gemma,
    "gemma2": lambda c: _gemma(c, norms=4),
    "gemma3_text": lambda c: _gemma(c, norms=4, head_norms=True),
    "phi3": lambda c: _read(c, PHI3_NAMES),
    "granite": lambda c: _read_llama(c, mlp_bias=bool(c.get("mlp_bias"))),
    "mixtral": lambda c: _experts(c, _read(c), "intermediate_size"),
    "qwen2_moe": lambda c: _experts(
        c,
        _read(c, qkv_bias=c.get("qkv_bias", True)),
        "moe_intermediate_size",
        c["shared_expert_intermediate_size"],
    ),
    "qwen3_moe": lambda c: _experts(c, _read_llama(c, head_norms=True), "moe_intermediate_size"),
    "olmoe": _olmoe,
    "gpt2": _gpt2,
    "gpt_neox": lambda c: _biased(c, GPT_NEOX_NAMES, bool(c.get("attention_bias", True))),
    **dict.fromkeys(BERTS, _bert),
    "distilbert": _distilbert,
}
