"""Write a trained model as a folder for the libraries transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from paceline.inference.export import WEIGHTS_FILE, write_weights
from paceline.io.files import write_atomic
from paceline.workloads.transformers import lora
from paceline.workloads.transformers.model_files import CONFIG, EXTRA_FILES, TOKENIZER
from paceline.workloads.transformers.sections import ModelFolder

TOKENIZER_CONFIG = "tokenizer_config.json"
ANY_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}
PREFIX = "base_model.model."


def write_transformer(model: nn.Module, config: Any, kept: Path, folder: Path) -> None:
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TOKENIZER, *EXTRA_FILES):
        if (kept / name).is_file():
            write_atomic(folder / name, (kept / name).read_bytes())
    if not (folder / TOKENIZER_CONFIG).is_file():
        write_atomic(folder / TOKENIZER_CONFIG, json.dumps(ANY_TOKENIZER))
    write_weights(folder / WEIGHTS_FILE, merge_weights(model))
    write_atomic(folder / CONFIG, config.to_json_string(use_diff=False))


def merge_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by the library's names, shared ones once, with adapters merged."""
    shared = cast(Any, model).all_tied_weights_keys
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in shared}
    for name, layer in lora.iter_adapters(model):
        weights[f"{name}.weight"] = lora.merge_adapter(weights[f"{name}.weight"], layer)
        del weights[f"{name}.{lora.A}"], weights[f"{name}.{lora.B}"]
    return weights


def write_adapters(model: nn.Module, section: ModelFolder, folder: Path) -> None:
    """Write the adapters, and what else was trained, for `PeftModel.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = dict(lora.iter_adapters(model))
    others = {n: p for n, p in model.named_parameters() if p.requires_grad and not n.endswith((lora.A, lora.B))}
    tensors = {f"{PREFIX}{name}": p.detach() for name, p in others.items()}
    for name, layer in layers.items():
        tensors |= {f"{PREFIX}{name}.{part}.weight": getattr(layer, part).detach() for part in (lora.A, lora.B)}
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if section.task == "sequence_classification" else "CAUSAL_LM",
        "base_model_name_or_path": str(section.init_from or section.config),
        "r": section.lora_rank,
        "lora_alpha": section.lora_scale * section.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": _targets(model, layers),
        "fan_in_fan_out": not all(isinstance(layer, nn.Linear) for layer in layers.values()),
        "modules_to_save": sorted({name.split(".")[0] for name in others}) or None,
        "bias": "none",
    }
    write_weights(folder / "adapter_model.safetensors", tensors)
    write_atomic(folder / "adapter_config.json", json.dumps(config, indent=2))


def _targets(model: nn.Module, layers: Collection[str]) -> list[str]:
    """Name layers by their last words, or by whole names if those would match other layers too."""
    words = {name.rpartition(".")[2] for name in layers}
    meant = [
        name for name, module in model.named_modules() if lora.linear_sides(module) and name.rpartition(".")[2] in words
    ]
    return sorted(words if set(meant) == set(layers) else layers)
