"""The cost model of a model of the library transformers: from the sizes in its config, mostly without torch.

An architecture without a formula here is counted on a model of the library on the meta device.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.config import DEFAULT, RunSpec
from paceline.data.corpora.documents import TokenStreams
from paceline.data.files import invalid_data
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.planner.candidates import SplitOptions
from paceline.planner.formulas import shape
from paceline.planner.formulas.shape import BlockShape
from paceline.planner.model_inputs import USUAL_DEVIATION, TextStatistics, apply_frozen_groups, assume_mean_length
from paceline.planner.training_cost import LengthStats, TrainingCostModel, dtype_sizes_of
from paceline.workloads.transformers import ENTRY, model_files
from paceline.workloads.transformers.architectures import ARCHITECTURES, CAUSAL, Sizes, sizes_of
from paceline.workloads.transformers.chat import PACKABLE, ChatCorpus, pack_lengths
from paceline.workloads.transformers.model_files import ConfigFile, read_config
from paceline.workloads.transformers.sections import LENGTH_STEP, TASKS

ASSUMED_CLASSES = 2
COUNTED = "{} has no formula here: its parameters are counted, its work is that of a plain transformer of its width"
GELU_STEPS, GELU_CASTS = (40, 6), 42
"""Passes over the features in both directions, and copies kept, of a GELU of seven kernels; passes of casts beside."""
ADAPTER_OPERATIONS, ADAPTER_PASSES = 4, 4 / 3
"""Beside a layer; and over what goes in and comes out, which thin products read and write again."""
BIASED_PASSES = 100
"""Over the width, where layers have biases and norms with a mean: to sum gradients over tokens, and to cast in and out
of fp32."""
ATTENTION_DROPOUTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
DROPPED_WIDTHS = 1.0, 4.3  # kept (masks) and moved in a layer that drops what it adds, twice
PACKED_FILL = 192  # tokens that fill up a row of texts, on average
IN_FP32 = 6.0  # widths that two norms keep, as 16-bit elements: what goes in stays in fp32, and nothing is dropped


def build_transformers_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TrainingCostModel:
    model: Any = spec.model
    file = read_config(model)
    facts = _read_statistics(spec, file, samples, tokens)
    assumptions = [*facts.assumptions]
    sizes = sizes_of(file.values) if model.task in ("causal_lm", "sequence_classification") else None
    if sizes is None or (not sizes.causal and model.task == "causal_lm"):
        sizes = _count_sizes(file, model.task, facts.classes)
        assumptions.append(COUNTED.format(file.model_type))
    if spec.origin("model.task") == DEFAULT and (names := file.values.get("architectures")):
        assumptions.append(
            f"{names[0]} is planned as {model.task} of {file.model_type}; change it with  model.task=NAME"
        )
    if spec.origin("train.precision") == str(model.config):
        assumptions.append(f"{spec.train.precision}, as the config says; change it with  train.precision=fp32")
    usual = ARCHITECTURES.get(file.model_type, {}).get("dropouts", {})
    drops = model_files.find_dropouts({**usual, **file.values}) if model.dropout else {}
    divided = model.task == "causal_lm" and file.model_type in CAUSAL and not drops
    if model.lora_rank and spec.train.precision in ("bf16", "fp8") and not file.bf16:
        assumptions.append('frozen weights in fp32, as the config does not say  "dtype": "bfloat16"')
    in_bf16 = spec.train.precision in ("bf16", "fp8") and spec.parallel.engine == "torch"
    length = facts.estimate_padded_length(spec.train.global_batch, LENGTH_STEP)

    def build(length: int, packed: bool = False) -> tuple[BlockShape, ...]:
        found = _build_blocks(sizes, length, facts, spec, file.bf16 and in_bf16, drops, packed)
        return apply_frozen_groups(found, spec.train.groups, lambda: _build_model(file, model.task, facts.classes))

    blocks, packed = build(length), None
    if model.task == "sequence_classification" and in_bf16 and not drops:
        packed = build(math.ceil(facts.mean + PACKED_FILL / spec.train.global_batch), packed=True)
    chunked = None
    if not facts.classes and not sizes.biased_head:
        chunked = shape.chunk_loss(blocks[-1], length, sizes.vocab, sizes.width, trained=not model.lora_rank)
    return TrainingCostModel.of(
        spec,
        facts.count,
        blocks=blocks,
        chunked_head=chunked,
        traits=ENTRY.traits,
        splits=SplitOptions(
            splits=() if sizes.experts or model.lora_rank else (sizes.heads, sizes.kv_heads),
            context=spec.data.sequence if divided else 0,  # type: ignore[attr-defined]
            experts=sizes.experts,
            layers=0 if model.lora_rank else sizes.layers,
            inferred=True,
        ),
        unit="tokens",
        units_per_sample=facts.mean,
        sample_bytes=16.0 * facts.mean,
        lengths=LengthStats(facts.longest / length),
        probed=True,
        packed_blocks=packed,
        packed_lengths=replace(facts.lengths, varies=facts.lengths.varies or USUAL_DEVIATION),
        held_out=facts.held_out,
        narrow_gathers=in_bf16,
        assumptions=tuple(assumptions),
    )


def _read_statistics(spec: RunSpec, file: ConfigFile, samples: int | None, tokens: float | None) -> TextStatistics:
    data: Any = spec.data
    read = data.path is not None or spec.origin("data.source") != DEFAULT
    found = model_files.find_cached(spec) if read and not samples else None
    task = TASKS[spec.model.task]  # type: ignore[attr-defined]
    classes = (len(file.values.get("id2label") or ()) or ASSUMED_CLASSES) if task.classes else 0
    if task.sources == ("images",):
        length = _count_patches(file)
        if found is not None:
            return TextStatistics(len(found.train), length, length, 0.0, len(found.classes), len(found.test))
        assumed = (f"{classes} classes, images of {length} patches; the data were not read",)
        return TextStatistics(samples, length, length, classes=classes, assumptions=assumed)
    if task.length == "sequence":
        if tokens is not None:
            raise option_error("--tokens", f"a sample has data.sequence={data.sequence}; change that", "not-supported")
        known = -(-(len(found.train) - 1) // data.sequence) if isinstance(found, TokenStreams) else samples
        if isinstance(found, ChatCorpus):
            room = data.sequence if data.pack and file.model_type in PACKABLE else 0
            known = len(pack_lengths(np.diff(found.train.offsets), room))
        assumed = (f"samples of {data.sequence} tokens; change it with  data.sequence=N",)
        said = spec.origin("data.sequence") not in (DEFAULT, str(spec.model.config))  # type: ignore[attr-defined]
        return TextStatistics(known, data.sequence, data.sequence, assumptions=() if said else assumed)
    if found is not None:
        return TextStatistics.of(found, samples, tokens)
    mean = min(tokens or assume_mean_length(data.max_length), data.max_length)
    number = f"{classes} classes, " if classes else ""
    assumed = (f"{number}texts of {mean:.0f} tokens on average; the data were not read",)
    return TextStatistics(samples, mean, data.max_length, classes=classes, assumptions=assumed)


def _count_patches(file: ConfigFile) -> int:
    """Count the patches of an image, and the token before them."""
    config = file.values.get("vision_config", file.values)
    try:
        values = (config.get("image_size", 224), config.get("patch_size", 16))
        sides = [value if isinstance(value, list) else [value, value] for value in values]
        return 1 + math.prod(size // patch for size, patch in zip(*sides, strict=True))
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise invalid_data(f"{file.path}: invalid image_size or patch_size: {error}") from None


def _build_blocks(
    sizes: Sizes,
    length: int,
    facts: TextStatistics,
    spec: RunSpec,
    keeps_bf16: bool,
    drops: Mapping[str, float],
    packed: bool = False,
) -> tuple[BlockShape, ...]:
    """Build embedding, layer and head. With adapters, all but these and a head over classes is frozen.

    `packed`: texts lie end to end.
    """
    model: Any = spec.model
    classes = facts.classes
    sides = (sizes.layers, sizes.width, sizes.heads, length, sizes.vocab, sizes.ffn, sizes.kv_heads)
    embedding, layer, head = shape.ModelShape(
        *sides,
        sizes.gated,
        sizes.tied,
        learned_positions=sizes.learned_positions,
        causal=sizes.causal,
        classes=classes,
        head_width=sizes.head_width,
    ).blocks
    half = dtype_sizes_of(spec.train).element_bytes == 2
    if half and any(name in drops for name in ATTENTION_DROPOUTS):
        layer = _drop_scores(layer)
    if sizes.active:
        layer = shape.add_experts(layer, sizes.active, sizes.ffn, sizes.shared_ffn, length)
    rotary, biased = not sizes.learned_positions, not sizes.gated
    turned = sizes.head_width * (sizes.heads + sizes.kv_heads)
    adapters = sizes.adapters(model.lora_rank, model.lora_targets) if model.lora_rank else 0
    adapted = [sides for name, *sides in sizes.linear if adapters and name in (model.lora_targets or (name,))]
    operations = shape.ROTARY_OPERATIONS * 2 / 3 * rotary + ADAPTER_OPERATIONS * len(adapted)
    attention = layer.attention and replace(
        layer.attention, masked=not packed and facts.longest > facts.mean, packed=packed
    )
    frozen = bool(model.lora_rank)
    halved = frozen and keeps_bf16
    linear = [inner * outer for _, inner, outer in sizes.linear]
    narrow = [side * outer for _, side, outer in sizes.linear if not side % shape.PACKED_BLOCK]
    narrow *= model.quantize != "none"
    head_frozen = frozen and not classes
    gate_passes, gate_kept = GELU_STEPS if sizes.stepwise_gelu else (shape.GATE_PASSES * sizes.gated, sizes.gated)
    return (
        replace(
            embedding,
            params=sizes.tables,
            frozen_params=sizes.tables * frozen,
            table_params=sizes.tables - sizes.vocab * sizes.width * (sizes.tied and not classes),
        ),
        replace(
            layer,
            params=sizes.layer + adapters,
            expert_params=float(sizes.experts * 3 * sizes.width * sizes.ffn),
            frozen_params=sizes.layer * frozen,
            half_params=(sum(linear) - sum(narrow)) * halved,
            packed_params=float(sum(narrow)),
            unpacked_params=float(max(narrow, default=0)),
            attention=attention,
            moved_elements=layer.moved_elements
            + length * (ADAPTER_PASSES * sum(map(sum, adapted)) + DROPPED_WIDTHS[1] * sizes.width * bool(drops)),
            saved_whole_elements=((IN_FP32 if half else 4.0) + DROPPED_WIDTHS[0] * bool(drops)) * length * sizes.width,
            eager_elements=length * (shape.ROTARY_PASSES * turned * rotary + gate_passes * sizes.ffn),
            cast_elements=length
            * (BIASED_PASSES * sizes.width * biased + GELU_CASTS * sizes.ffn * sizes.stepwise_gelu),
            eager_saved_elements=length
            * (shape.UNFUSED_NORMS * sizes.width * (not biased) + gate_kept * sizes.ffn * max(1, sizes.active)),
            kernels=layer.kernels + shape.LAUNCHES_PER_OPERATION * operations,
        ),
        replace(
            head,
            params=sizes.head(classes),
            frozen_params=sizes.head(0) * head_frozen,
            half_params=sizes.vocab * sizes.width * (halved and head_frozen and not sizes.tied),
        ),
    )


def _drop_scores(layer: BlockShape) -> BlockShape:
    """Store the scores of a layer: no fused kernel drops by the keys of samples."""
    assert layer.attention is not None
    attention = replace(layer.attention, fused=False, dropped=True)
    scores = attention.copies * attention.score_elements
    return replace(layer, attention=attention, saved_split_elements=layer.saved_split_elements + scores)


def _build_model(file: ConfigFile, task: str, classes: int) -> Any:
    from paceline.workloads.transformers.build import build_sized_config, build_transformer

    config = build_sized_config(file)
    if classes:
        config.num_labels = classes
    return build_transformer(config, task)


def _read_size(config: Any, name: str) -> int:
    """Return a whole number of a config; 0 if it has none, or another one for each layer."""
    try:
        value = getattr(config, name, 0)
    except Exception:  # the library's own, of a value that differs between layers
        return 0
    return value if isinstance(value, int) else 0


def _count_sizes(file: ConfigFile, task: str, classes: int) -> Sizes:
    """Count the sizes of a model that the library can build."""
    from paceline.workloads.transformers.build import find_blocks
    from paceline.workloads.transformers.lora import linear_sides

    model = _build_model(file, task, classes)
    layers = find_blocks(model)
    text = model.config.get_text_config()
    text = getattr(model.config, "vision_config", text) if task == "image_classification" else text
    width, heads, vocab = (_read_size(text, name) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    if not layers or not width or not heads:
        message = f"{file.path}: {file.model_type} is not built of equal layers of one width; a plan cannot price it"
        raise UserError(message, code="not-supported", key="model_type")
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    whole = sum(p.numel() for p in model.parameters())
    linear = [(name, found) for name, module in layers[0].named_modules() if (found := linear_sides(module))]
    kv_heads = _read_size(text, "num_key_value_heads") or heads
    head_width = _read_size(text, "head_dim") or width // heads
    active, each = (_read_size(text, name) for name in ("num_experts_per_tok", "moe_intermediate_size"))
    wide = (_read_size(text, name) for name in ("intermediate_size", "encoder_ffn_dim", "d_ff"))
    ffn = active * each or next(filter(None, wide), 4 * width)
    return Sizes(
        *(len(layers), width, heads, kv_heads, head_width, ffn, vocab),
        gated=any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in linear),
        causal=task == "causal_lm",
        linear=tuple((name.rpartition(".")[2], *found) for name, found in linear),
        context=_read_size(text, "max_position_embeddings"),
        tables=whole - inside // len(layers) * len(layers) - classes * width,
        layer=inside // len(layers),
        tied=True,  # whatever else there is counts among the tables
        learned_positions=False,
        stepwise_gelu=any(type(module).__name__ == "NewGELUActivation" for module in model.modules()),
        biased_head=getattr(model.get_output_embeddings(), "bias", None) is not None,
    )
