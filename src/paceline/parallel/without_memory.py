"""A model whose parameters have no memory while it is built, because their values come from elsewhere.

Each loses it as soon as a module has it, so that there is one at a time. Buffers, and whatever else the model computes
while it is built, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters that modules are given in here are on the meta device; one that has two places stays one."""
    register, emptied = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or type(param) is not nn.Parameter or param.is_meta:
            return
        if param not in emptied:
            emptied[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        module._parameters[name] = emptied[param]

    cast(Any, nn.Module).register_parameter = register_empty
    try:
        yield
    finally:
        cast(Any, nn.Module).register_parameter = register


def has_passing_buffers(model: nn.Module) -> bool:
    """Whether it has buffers that no file of its weights holds."""
    return any(module._non_persistent_buffers_set for module in model.modules())


def shares_parameters(model: nn.Module) -> bool:
    """Whether one has two places: each of them would be given memory of its own."""
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.named_parameters()))


def move_others(model: nn.Module, device: torch.device) -> None:
    """What has memory goes to the device."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """To what has none; values come later."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
