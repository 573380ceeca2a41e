"""A model of the library transformers: its class, its skeleton without memory, and its first weights."""

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.config.registry import describe_error
from paceline.data.files import invalid_data
from paceline.errors import UserError, did_you_mean, reject_value
from paceline.inference.export import write_shards, write_weights
from paceline.io.files import write_atomic
from paceline.nn.nf4 import NF4Linear, unpack
from paceline.parallel.parameters import copy_whole
from paceline.trainer.init_from import SavedWeights
from paceline.workload import find_repeated_layers
from paceline.workloads.transformers import lora
from paceline.workloads.transformers.model_files import EXTRA_FILES, TOKENIZER, ConfigFile
from paceline.workloads.transformers.sections import CONFIG, PREPROCESSOR, TASKS, ModelFolder

UNKEYED = ("layerdrop", "drop_path", "droppath")
"""Parts of the names of probabilities that leave whole layers out, drawn by pass, not by sample."""
SHARED_DROPOUT = "pos_dropout"
"""Of tables of positions (deberta), one draw for all samples, which would differ between ranks."""
BIDIRECTIONAL = ("cpmant", "xlm", "xlnet")  # though the library calls them causal
TOKENIZER_CONFIG = "tokenizer_config.json"
ANY_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}
PREFIX = "base_model.model."


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        hint = "type  pip install 'paceline[transformers]'"
        raise UserError(f"workload: transformers is not installed; {hint}", code="not-installed") from None
    transformers.logging.set_verbosity_error()
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    for module in (hub_kernels, modeling_utils):  # native code that a config can name, or an architecture fetch
        module.is_kernels_available = lambda *_, **__: False
    return transformers


@contextmanager
def stay_offline() -> Iterator[None]:
    """Keep the library from fetching anything while it builds what a file describes."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def build_config(file: ConfigFile) -> Any:
    """Build the library's config. Code beside a config is never run."""
    known = import_transformers().CONFIG_MAPPING
    if file.model_type not in known:
        near = did_you_mean(file.model_type, list(known.keys()))
        message = f"{file.path}: transformers has no architecture {file.model_type!r}{near}; code of others is not run"
        raise UserError(message, code="unknown-name", key="model_type")
    kind = known[file.model_type]
    if shadowed := [key for key in file.values if callable(getattr(kind, key, None))]:
        raise invalid_data(f"{file.path}: {shadowed[0]} is not a key of a config", shadowed[0])
    try:
        with stay_offline():
            return kind.from_dict(file.values)
    except Exception as error:  # the library checks values in many ways
        raise invalid_data(f"{file.path}: transformers rejects this config: {describe_error(error)}") from None


def build_sized_config(file: ConfigFile) -> Any:
    """Build the config of a file that gives its sizes, for which the library would take defaults."""
    config = build_config(file)
    for name in ("hidden_size", "num_hidden_layers"):
        own = config.attribute_map.get(name, name)
        if own not in file.values and name not in file.values and own in vars(config):
            raise invalid_data(f"{file.path}: it has no {own}, so the size of the model is not known", own)
    return config


def find_model_class(config: Any, task: str) -> Any:
    """Return the library's class; UserError names the tasks that this architecture has, if any."""
    classes = {name: getattr(import_transformers(), row.auto)._model_mapping for name, row in TASKS.items()}
    possible = [  # not those that take the part of a config that is about text
        name
        for name, known in classes.items()
        if type(config) in known and isinstance(config, getattr(known[type(config)], "config_class", object))
    ]
    if getattr(config, "is_encoder_decoder", False) and "causal_lm" in possible:
        possible.remove("causal_lm")  # that would be the decoder alone
    if task in possible:
        return classes[task][type(config)]
    typed = f"type  model.task={'  or  model.task='.join(possible)}"
    hint = typed if possible else f"none of {', '.join(TASKS)} fits it"
    raise reject_value("model.task", task, f"not supported for the architecture {config.model_type!r}; {hint}")


def find_renamed(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return {name in the model: name in a file} of tensors that the library has renamed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    changes = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    prefix, state = model.base_model_prefix, model.state_dict()
    return {rename_source_key(name, changes, [], prefix, state)[0]: name for name in names}


def find_blocks(model: Any) -> list[nn.Module]:
    """Return the repeated layers: of an encoder and a decoder, those of both."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return find_repeated_layers(model)
    return [layer for part in (model.get_encoder(), model.get_decoder()) for layer in find_repeated_layers(part)]


def make_causal(config: Any) -> bool:
    """Let each token attend to earlier ones only; return whether that is a change."""
    if config.model_type in BIDIRECTIONAL:
        reason = f"{config.model_type} attends to later tokens; use another architecture"
        raise reject_value("model.task", "causal_lm", reason)
    changed = getattr(config, "is_decoder", None) is False
    if changed:
        config.is_decoder = True
    return changed


def build_transformer(config: Any, task: str) -> nn.Module:
    """Build the model on the meta device; `initialise` draws its weights once it has memory."""
    kind = find_model_class(config, task)
    try:
        with torch.device("meta"), stay_offline():
            model: nn.Module = kind._from_config(config, dtype=torch.float32)
    except Exception as error:  # it meets a wrong value in many ways
        raise UserError(f"model: transformers cannot build this {config.model_type}: {describe_error(error)}") from None
    for name, module in model.named_modules():
        if name.endswith(SHARED_DROPOUT):
            cast(Any, module).p = 0.0
    return model.train()


def attach_initialise(model: nn.Module, blocks: Sequence[nn.Module], given: Collection[str]) -> nn.Module:
    """Give the model a method `initialise(seed)`, which skips layers whose weights are `given` later."""
    names = {id(module): name for name, module in model.named_modules()}
    cast(Any, model).initialise = partial(draw_weights, model, [names[id(block)] for block in blocks], given)
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, blocks: Sequence[str], given: Collection[str], seed: int) -> None:
    """Draw the weights as the library does, and set the buffers, one layer at a time in host memory.

    Each layer has a random stream of its name: a shard and the whole model draw the same.
    """
    cast(Any, model).tie_weights()  # each module got its own memory
    layers = {name: model.get_submodule(name) for name in blocks}
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    named = {name: module for name, module in model.named_modules() if id(module) not in inside}
    owned = (inner for name, module in named.items() for inner, _ in module.named_parameters(name, recurse=False))
    every_given = all(inner in given for inner in owned)  # then large tables are not drawn, to be read afterwards
    rest = [module for module in named.values() if module._buffers or not every_given]

    def draw(module: nn.Module) -> None:
        cast(Any, model)._init_weights(module)
        if isinstance(module, lora.LowRank):
            module.draw()

    for name, layer in layers.items():
        wanted = {inner for inner, _ in layer.named_parameters(prefix=name) if inner not in given}
        if all(inner.endswith((lora.A, lora.B)) for inner in wanted) and not list(layer.buffers()):
            adapters = [module for module in layer.modules() if isinstance(module, lora.LowRank)] if wanted else []
            _draw(adapters, lora.LowRank.draw, name, seed)
        else:
            _draw(list(layer.modules()), draw, name, seed)
    _draw(rest, draw, "", seed)


def _draw(modules: Sequence[nn.Module], draw: Callable[[Any], None], name: str, seed: int) -> None:
    """Replace the tensors of the modules by whole ones in host memory, draw these, and copy."""
    wholes: dict[int, tuple[Tensor, Tensor]] = {}
    places = list(_tensors(modules, only_adapters=draw is lora.LowRank.draw))
    for held, key, tensor in places:
        if id(tensor) not in wholes:
            real = isinstance(tensor, nn.Parameter)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            wholes[id(tensor)] = tensor, nn.Parameter(whole, tensor.requires_grad) if real else whole
        held[key] = wholes[id(tensor)][1]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        for module in reversed(modules):  # inner ones first: some layers draw weights of their parts again
            draw(module)
    for held, key, tensor in places:
        held[key] = tensor
    for tensor, whole in wholes.values():
        copy_whole(tensor, whole.detach())


def _tensors(modules: Sequence[nn.Module], only_adapters: bool) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (dict of the module, name, parameter or buffer)."""
    for module in modules:
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and (not only_adapters or name in (lora.A, lora.B)):
                    yield held, name, tensor


def write_transformer(model: nn.Module, stored: SavedWeights, config: Any, kept: Path, folder: Path) -> None:
    """Write the weights, one tensor at a time, and what else `from_pretrained` reads."""
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TOKENIZER, PREPROCESSOR, *EXTRA_FILES):
        if (kept / name).is_file():
            write_atomic(folder / name, (kept / name).read_bytes())
    if (folder / TOKENIZER).is_file() and not (folder / TOKENIZER_CONFIG).is_file():
        write_atomic(folder / TOKENIZER_CONFIG, json.dumps(ANY_TOKENIZER))
    shared, own = cast(Any, model).all_tied_weights_keys, model.state_dict()
    names = [name for name in own if name not in shared and not name.endswith((lora.A, lora.B))]
    tensors = {name: _merge_weight(model, name, own.__getitem__) for name in names}
    write_shards(folder, tensors, lambda name: _merge_weight(model, name, lambda n: stored.get(n).to(own[n].dtype)))
    write_atomic(folder / CONFIG, config.to_json_string(use_diff=False))


def _merge_weight(model: nn.Module, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Return a tensor by the library's name, unpacked, with the adapter of its layer merged."""
    owner, _, part = name.rpartition(".")
    module, tensor = model.get_submodule(owner), read(name)
    if isinstance(module, NF4Linear) and part == "weight":
        tensor = unpack(tensor, torch.float32)
    if isinstance(module, lora.LowRank) and part == "weight":
        tensor = lora.merge_adapter(tensor, module, *(read(f"{owner}.{part}") for part in (lora.A, lora.B)))
    return tensor


def write_adapters(model: nn.Module, stored: SavedWeights, section: ModelFolder, folder: Path) -> None:
    """Write the adapters, and what else was trained, for `PeftModel.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, lora.LowRank)}
    others = {n: p for n, p in model.named_parameters() if p.requires_grad and not n.endswith((lora.A, lora.B))}
    places = {f"{PREFIX}{name}": name for name in others}
    places |= {f"{PREFIX}{name}.{part}.weight": f"{name}.{part}" for name in layers for part in (lora.A, lora.B)}
    words = {name.rpartition(".")[2] for name in layers}
    linear = (name for name, module in model.named_modules() if lora.linear_sides(module))
    unique = {name for name in linear if name.rpartition(".")[2] in words} == set(layers)
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[section.task].peft,
        "base_model_name_or_path": str(section.init_from or section.config),
        "r": section.lora_rank,
        "lora_alpha": section.lora_scale * section.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(words if unique else layers),
        "fan_in_fan_out": not all(isinstance(layer, nn.Linear | NF4Linear) for layer in layers.values()),
        "modules_to_save": sorted({name.split(".")[0] for name in others}) or None,
        "bias": "none",
    }
    like = {name: stored.like[place] for name, place in places.items()}
    write_weights(folder / "adapter_model.safetensors", like, lambda name: stored.get(places[name]))
    write_atomic(folder / "adapter_config.json", json.dumps(config, indent=2))
