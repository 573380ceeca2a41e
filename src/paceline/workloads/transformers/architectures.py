"""Sizes of a model from its config.json alone, for the usual architectures: no torch, no weights, no memory.

Parameters are counted exactly; tests compare them with the library's own models.
"""

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidData
from paceline.io.safe_yaml import load_yaml

Values = Mapping[str, Any]
Linear = tuple[str, int, int]  # name, inputs, outputs
LLAMA_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ARCHITECTURES: dict[str, dict[str, Any]] = load_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CAUSAL = {name for name, row in ARCHITECTURES.items() if row.get("facts", {}).get("causal", True)}
"""Architectures whose tokens meet in causal attention alone, and that take their places from the caller."""
SOMETIMES_READ = {
    *("attention_bias", "mlp_bias", "qkv_bias", "type_vocab_size", "activation_function"),
    *("add_cross_attention", "mlp_only_layers", "decoder_sparse_step"),
}
"""Keys of a config that matter to architectures with a default of them."""


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
    biased_head: bool = False  # over the vocabulary, whose loss is then not computed in chunks

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
    row = ARCHITECTURES.get(values["model_type"])
    if row is None:
        return None
    defaults = row.get("defaults", {})
    given = defaults | {key: value for key, value in values.items() if key in defaults or key not in SOMETIMES_READ}
    given |= {name: given.get(other) for name, other in row.get("renamed", {}).items()} | row.get("facts", {})
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("add_cross_attention") or given.get("mlp_only_layers") or given.get("decoder_sparse_step", 1) != 1:
        return None  # its layers are not equal
    kind = f"config.json of {values['model_type']}"
    try:
        sizes = _read_sizes(given)
        if not row.get("any_width") and sizes.width % sizes.heads:
            raise TypeError(f"a width of {sizes.width} is not a multiple of {sizes.heads} heads")
        if any(type(n) is float or n < 0 for n in astuple(sizes) if isinstance(n, int | float)):
            raise TypeError("they are not whole numbers")
        return sizes
    except KeyError as missing:
        key = row.get("renamed", {}).get(missing.args[0], missing.args[0])
        raise InvalidData(f"{kind} has no {key!r}, so its size is not known") from None
    except (TypeError, ZeroDivisionError) as error:
        raise InvalidData(f"{kind} has invalid sizes: {error}") from None


def _read_sizes(c: Values) -> Sizes:
    """Read the sizes from the keys of a config and the facts of its architecture."""
    width, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    gated, causal, learned = c.get("gated", True), c.get("causal", True), c.get("learned_positions", False)
    ffn = c["intermediate_size"] if "ffn_ratio" not in c else c.get("intermediate_size", c["ffn_ratio"] * width)
    kv_heads = c.get("num_key_value_heads") or heads
    head_width = c.get("head_dim") or width // heads
    q, kv, up = heads * head_width, kv_heads * head_width, ffn * (1 + gated)
    names = c.get("names", LLAMA_NAMES)
    outer = [q, kv, kv] if len(names) > 4 else [q + 2 * kv]
    *ins, out = names[: len(outer) + 1]
    *ups, down = names[len(outer) + 1 :]
    linear: tuple[Linear, ...] = (
        *((name, width, side) for name, side in zip(ins, outer, strict=True)),
        (out, q, width),
        *((name, width, up // len(ups)) for name in ups),
        (down, ffn, width),
    )
    biased = c.get("attention_bias", False)
    biases = bool(c.get("qkv_bias", biased)) * (q + 2 * kv) + bool(biased) * width
    biases += bool(c.get("mlp_bias")) * (up + width)
    norms = c.get("norms", 2) * width + 2 * head_width * c.get("head_norms", False)
    norms += (width + width // heads * kv_heads) * c.get("whole_norms", False)
    rows = vocab + c.get("type_vocab_size", 0) + (c["max_position_embeddings"] if learned else 0)
    found = Sizes(
        *(c["num_hidden_layers"], width, heads, kv_heads, head_width, ffn, vocab),
        gated=gated,
        causal=causal,
        linear=linear,
        context=c.get("max_position_embeddings") or 0,
        tables=rows * width + (0 if causal else 2 * width),  # an encoder has a norm here, and none after the last layer
        layer=_count_weights(linear) + biases + norms,
        final=width * (2 - gated) * causal,
        pooling=0 if causal else width * width + width,
        tied=bool(c.get("tie_word_embeddings", False)),
        class_biases=not causal,
        learned_positions=learned,
        stepwise_gelu=c.get("activation_function") == "gelu_new",
    )
    return _add_experts(c, found) if "expert_ffn" in c else found


def _count_weights(linear: tuple[Linear, ...]) -> int:
    return sum(inner * outer for _, inner, outer in linear)


def _add_experts(c: Values, plain: Sizes) -> Sizes:
    """Replace the feed-forward part by experts and a router, and an expert for all tokens if there is one."""
    width, experts, each = plain.width, c.get("num_local_experts") or c["num_experts"], c[c["expert_ffn"]]
    shared = c["shared_expert_intermediate_size"]
    linear = tuple(one for one in plain.linear if not one[0].endswith(("gate_proj", "up_proj", "down_proj")))
    replaced = _count_weights(plain.linear) - _count_weights(linear)
    if shared:
        sides = (("gate_proj", width, shared), ("up_proj", width, shared), ("down_proj", shared, width))
        linear = (*linear, *sides, ("shared_expert_gate", width, 1))
    added = experts * (3 * width * each + width) + 3 * width * shared + width * bool(shared)
    return replace(
        plain,
        ffn=each,
        linear=linear,
        layer=plain.layer - replaced + added,
        experts=experts,
        active=c["num_experts_per_tok"],
        shared_ffn=shared,
    )
