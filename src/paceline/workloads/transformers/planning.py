"""The cost model of a model of the library transformers: from the sizes in its config, mostly without torch.

An architecture without a formula here is counted on a model of the library on the meta device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.config import DEFAULT, RunSpec
from paceline.data.corpora.documents import TokenStreams
from paceline.data.files import invalid_data
from paceline.errors import UserError
from paceline.planner.formulas.shape import (
    GATE_PASSES,
    LAUNCHES_PER_OPERATION,
    ROTARY_OPERATIONS,
    ROTARY_PASSES,
    UNFUSED_NORMS,
    BlockShape,
    ModelShape,
)
from paceline.planner.model_inputs import TextStatistics, apply_frozen_groups, assume_mean_length, list_weights
from paceline.planner.training_cost import TrainingCostModel
from paceline.workloads.transformers import ENTRY, model_files
from paceline.workloads.transformers.architectures import TransformerSizes, sizes_of
from paceline.workloads.transformers.model_files import ConfigFile, read_config
from paceline.workloads.transformers.tasks import TASKS

ASSUMED_CLASSES = 2
ROUTED_PASSES, ROUTER_OPERATIONS = 4, 12
"""Over what is sent to an expert and back, copied and weighted; operations that choose the experts."""
EVERY_EXPERT = "every rank holds or gathers all experts: expert parallelism is not priced"
COUNTED = "{} has no formula here: its parameters are counted, its work is that of a plain transformer of its width"
ADAPTER_OPERATIONS = 4


def build_transformers_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TrainingCostModel:
    model: Any = spec.model
    file = read_config(model)
    facts = _read_statistics(spec, file, samples, tokens)
    assumptions = [*facts.assumptions]
    sizes = sizes_of(file.values) if model.task in ("causal_lm", "sequence_classification") else None
    if sizes is None or (not sizes.causal and model.task == "causal_lm"):
        sizes = _count_sizes(file, model.task, facts.classes)
        assumptions.append(COUNTED.format(file.model_type))
    elif sizes.active:
        assumptions.append(EVERY_EXPERT)
    if model.lora_rank and spec.train.precision in ("bf16", "fp8") and not file.bf16:
        assumptions.append('frozen weights in fp32, as the config does not say  "dtype": "bfloat16"')
    return TrainingCostModel.of(
        spec,
        facts.count,
        blocks=apply_frozen_groups(
            _build_blocks(sizes, max(1, round(facts.mean)), facts.classes, model, _keeps_bf16(spec, file)),
            spec.train.groups,
            lambda: list_weights(_build_model(file, model.task, facts.classes)),
        ),
        traits=ENTRY.traits,
        unit="tokens",
        units_per_sample=facts.mean,
        sample_bytes=16.0 * facts.mean,
        lengths=facts.lengths,
        held_out=facts.held_out,
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
            message = f"--tokens: samples have data.sequence={data.sequence} tokens; change that instead"
            raise UserError(message, code="not-supported", key="--tokens")
        known = -(-(len(found.train) - 1) // data.sequence) if isinstance(found, TokenStreams) else samples
        assumed = (f"samples of {data.sequence} tokens; change it with  data.sequence=N",)
        said = spec.origin("data.sequence") != DEFAULT
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


def _keeps_bf16(spec: RunSpec, file: ConfigFile) -> bool:
    return file.bf16 and spec.train.precision in ("bf16", "fp8") and spec.parallel.engine == "torch"


def _build_blocks(
    sizes: TransformerSizes, length: int, classes: int, model: Any, keeps_bf16: bool
) -> tuple[BlockShape, ...]:
    """Build embedding, layer and head. With adapters, all but these and a head over classes is frozen."""
    sides = (sizes.layers, sizes.width, sizes.heads, length, sizes.vocab, sizes.ffn, sizes.kv_heads)
    embedding, layer, head = ModelShape(
        *sides,
        sizes.gated,
        sizes.tied,
        learned_positions=sizes.learned_positions,
        causal=sizes.causal,
        classes=classes,
        head_width=sizes.head_width,
    ).blocks
    if sizes.active:
        layer = _add_experts(layer, sizes, length)
    rotary = not sizes.learned_positions
    turned = sizes.head_width * (sizes.heads + sizes.kv_heads)
    adapters = sizes.adapters(model.lora_rank, model.lora_targets) if model.lora_rank else 0
    adapted = sum(not model.lora_targets or name in model.lora_targets for name, *_ in sizes.linear)
    operations = ROTARY_OPERATIONS * 2 / 3 * rotary + ADAPTER_OPERATIONS * adapted * bool(adapters)
    frozen = bool(model.lora_rank)
    halved = frozen and keeps_bf16
    head_frozen = frozen and not classes
    return (
        replace(embedding, params=sizes.tables, frozen_params=sizes.tables * frozen),
        replace(
            layer,
            params=sizes.layer + adapters,
            frozen_params=sizes.layer * frozen,
            half_params=sum(inner * outer for _, inner, outer in sizes.linear) * halved,
            eager_elements=length * (ROTARY_PASSES * turned * rotary + GATE_PASSES * sizes.ffn * sizes.gated),
            eager_saved_elements=length * (UNFUSED_NORMS * sizes.width + sizes.ffn * sizes.gated),
            kernels=layer.kernels + LAUNCHES_PER_OPERATION * operations,
        ),
        replace(
            head,
            params=sizes.head(classes),
            frozen_params=sizes.head(0) * head_frozen,
            half_params=sizes.vocab * sizes.width * (halved and head_frozen and not sizes.tied),
        ),
    )


def _add_experts(layer: BlockShape, sizes: TransformerSizes, length: int) -> BlockShape:
    """Add the experts of a layer that a token goes through, as products over all experts at once."""
    width, ffn, shared, more = sizes.width, sizes.ffn, sizes.shared_ffn, sizes.active - 1
    *attention, up, down = layer.matmuls
    products = (*attention, replace(up, rows=up.rows * sizes.active), replace(down, rows=down.rows * sizes.active))
    if shared:
        products += (replace(up, outer=2 * shared), replace(down, inner=shared))
    features = length * 3.0 * (more * ffn + shared)
    return replace(
        layer,
        matmuls=products,
        moved_elements=layer.moved_elements + features + ROUTED_PASSES * length * sizes.active * width,
        saved_split_elements=layer.saved_split_elements + features + length * sizes.active * width,
        kernels=layer.kernels + LAUNCHES_PER_OPERATION * ROUTER_OPERATIONS,
    )


def _build_model(file: ConfigFile, task: str, classes: int) -> Any:
    from paceline.workloads.transformers.build import build_config, build_transformer

    config = build_config(file)
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


def _count_sizes(file: ConfigFile, task: str, classes: int) -> TransformerSizes:
    """Count the sizes of a model that the library can build."""
    from paceline.workloads.transformers.build import find_blocks
    from paceline.workloads.transformers.lora import linear_sides

    model = _build_model(file, task, classes)
    layers = find_blocks(model)
    text = getattr(model.config, "vision_config", model.config.get_text_config())
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
    return TransformerSizes(
        *(len(layers), width, heads, kv_heads, head_width, ffn, vocab),
        gated=any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in linear),
        causal=task == "causal_lm",
        linear=tuple((name.rpartition(".")[2], *found) for name, found in linear),
        context=_read_size(text, "max_position_embeddings"),
        tables=whole - inside // len(layers) * len(layers) - classes * width,
        layer=inside // len(layers),
        tied=True,  # whatever else there is counts among the tables
        learned_positions=False,
    )
