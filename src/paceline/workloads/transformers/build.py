"""A model of the library transformers: its class, its skeleton without memory, and its first weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.config.registry import describe_error
from paceline.data.files import invalid_data
from paceline.errors import UserError, did_you_mean
from paceline.workloads.transformers import lora
from paceline.workloads.transformers.model_files import ConfigFile

BIDIRECTIONAL = ("cpmant", "xlm", "xlnet")  # though the library calls them causal
AUTO = {"causal_lm": "AutoModelForCausalLM", "sequence_classification": "AutoModelForSequenceClassification"}


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        hint = "type  pip install 'paceline[transformers]'"
        raise UserError(f"workload: transformers is not installed; {hint}", code="not-installed") from None
    transformers.logging.set_verbosity_error()
    return transformers


def build_config(file: ConfigFile) -> Any:
    """Build the library's config. Code beside a config is never run."""
    known = import_transformers().CONFIG_MAPPING
    if file.model_type not in known:
        near = did_you_mean(file.model_type, list(known.keys()))
        foreign = "; it brings its own code, which is not run" if "auto_map" in file.values else ""
        message = f"{file.path}: transformers has no architecture {file.model_type!r}{near}{foreign}"
        raise UserError(message, code="unknown-name", key="model_type")
    try:
        return known[file.model_type].from_dict(file.values)
    except Exception as error:  # the library checks values in many ways
        raise invalid_data(f"{file.path}: transformers rejects this config: {describe_error(error)}") from None


def find_dropouts(config: Any) -> dict[str, float]:
    return {
        name: value
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, int | float) and value > 0
    }


def find_model_class(config: Any, task: str) -> Any:
    classes = getattr(import_transformers(), AUTO[task])._model_mapping
    if type(config) in classes:
        return classes[type(config)]
    message = f"model.task={task}: transformers has no such model of the architecture {config.model_type!r}"
    raise UserError(message, code="not-supported", key="model.task")


def make_causal(config: Any) -> bool:
    """Let each token attend to earlier ones only; return whether that is a change."""
    if config.model_type in BIDIRECTIONAL:
        message = f"model.task=causal_lm: {config.model_type} attends to later tokens; use another architecture"
        raise UserError(message, code="not-supported", key="model.task")
    changed = getattr(config, "is_decoder", None) is False
    if changed:
        config.is_decoder = True
    return changed


def build_transformer(config: Any, task: str) -> nn.Module:
    """Build the model on the meta device; `initialise` draws its weights once it has memory."""
    kind = find_model_class(config, task)
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(config, dtype=torch.float32)
    except Exception as error:  # it meets a wrong value in many ways
        raise UserError(f"model: transformers cannot build this {config.model_type}: {describe_error(error)}") from None
    return model.train()


def attach_initialise(model: nn.Module, blocks: Sequence[nn.Module], given: Collection[str]) -> nn.Module:
    """Give the model a method `initialise(seed)`, which skips layers whose weights are `given` later."""
    names = {id(module): name for name, module in model.named_modules()}
    cast(Any, model).initialise = partial(draw_weights, model, [names[id(block)] for block in blocks], given)
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, blocks: Sequence[str], given: Collection[str], seed: int) -> None:
    """Draw the weights as the library does, and set the buffers, one layer at a time in host memory.

    Each layer has its own random stream, by its name, so that a shard and the whole model draw the same.
    """
    cast(Any, model).tie_weights()  # each module got its own memory
    layers = {name: model.get_submodule(name) for name in blocks}
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    for name, layer in layers.items():
        wanted = {inner for inner, _ in layer.named_parameters(prefix=name) if inner not in given}
        modules = list(layer.modules())
        if all(inner.endswith((lora.A, lora.B)) for inner in wanted) and not list(layer.buffers()):
            modules = [module for module in modules if isinstance(module, lora.LowRank)] if wanted else []
            _draw(modules, lora.LowRank.draw, name, seed)
        else:
            _draw(modules, partial(_initialise_module, model), name, seed)
    _draw(rest, partial(_initialise_module, model), "", seed)


def _initialise_module(model: nn.Module, module: nn.Module) -> None:
    cast(Any, model)._init_weights(module)
    if isinstance(module, lora.LowRank):
        module.draw()


def _draw(modules: Sequence[nn.Module], draw: Callable[[Any], None], name: str, seed: int) -> None:
    """Replace the tensors of the modules by whole ones in host memory, draw these, and copy."""
    wholes: dict[int, tuple[Tensor, Tensor]] = {}
    places = list(_tensors(modules, only_adapters=draw is lora.LowRank.draw))
    for held, key, tensor in places:
        if id(tensor) not in wholes:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            wholes[id(tensor)] = tensor, nn.Parameter(whole) if isinstance(tensor, nn.Parameter) else whole
        held[key] = wholes[id(tensor)][1]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        for module in reversed(modules):  # inner ones first: some layers draw weights of their parts again
            draw(module)
    for held, key, tensor in places:
        held[key] = tensor
    for tensor, whole in wholes.values():
        tensor.copy_(distribute_like(whole.detach(), tensor))


def distribute_like(whole: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _tensors(modules: Sequence[nn.Module], only_adapters: bool) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (dict of the module, name, parameter or buffer)."""
    for module in modules:
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and (not only_adapters or name in (lora.A, lora.B)):
                    yield held, name, tensor
