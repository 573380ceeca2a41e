"""Let convolutions read their input with the channels innermost, as tensor cores do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

OTHER_NORMS = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.LocalResponseNorm)
"""Their kernels put channels first again."""


def find_convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d)]


def use_channels_last(model: nn.Module) -> Sequence[RemovableHandle]:
    """Reorder what goes into each convolution; what comes out keeps the order."""
    return [module.register_forward_pre_hook(_reorder_input) for module in find_convolutions(model)]


def _reorder_input(convolution: nn.Module, inputs: Any) -> Any:
    return (reorder(inputs[0]), *inputs[1:]) if inputs else None


def reorder(x: Tensor) -> Tensor:
    """Return images or sequences with the channels innermost in memory; others as they are."""
    if x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 3 else x


def prefers_channels_last(model: nn.Module) -> bool:
    """Return whether images go through batch norms, and no other norm over channels."""
    modules = list(model.modules())
    others = any(isinstance(module, OTHER_NORMS) for module in modules)
    return all(any(isinstance(m, kind) for m in modules) for kind in (nn.Conv2d, nn.BatchNorm2d)) and not others
