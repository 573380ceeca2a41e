"""Low-rank adapters (LoRA, Hu et al. 2021): the weights stay as they are, beside each a product of two thin matrices.

A linear layer keeps its class, its place and the name of its weight, so that files of weights, sharding and
checkpoints see the same model with two more parameters per layer. Their names are those of the library PEFT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError, did_you_mean

A, B = "lora_A", "lora_B"


class LowRank(nn.Module):
    """What is added to a class of linear layers: y = layer(x) + scale · B A x."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def draw(self) -> None:
        """B begins at zero, so that nothing changes at first."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


@cache
def make_low_rank_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"LowRank{kind.__name__}", (LowRank, kind), {})


def add_adapters(blocks: Sequence[nn.Module], targets: Collection[str], rank: int, scale: float) -> None:
    """Give the linear layers of the blocks that are so named adapters of a rank; without names, all of them."""
    linear = [(name, module) for block in blocks for name, module in block.named_modules() if linear_sides(module)]
    names = sorted({name.rpartition(".")[2] for name, _ in linear})
    for target in targets:
        if target not in names:
            raise UserError(
                f"model.lora_targets: the model has no linear layer {target!r}{did_you_mean(target, names)}; "
                f"it has {', '.join(names)}"
            )
    for name, module in linear:
        if targets and name.rpartition(".")[2] not in targets:
            continue
        found = linear_sides(module)
        assert found is not None
        weight: Any = module.weight
        for key, shape in ((A, (rank, found[0])), (B, (found[1], rank))):
            module.register_parameter(key, nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device)))
        module.__class__ = make_low_rank_class(cast(Any, type(module)))
        module.lora_scale = scale


def linear_sides(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__.endswith("Conv1D"):  # the library's: a linear layer whose weight is transposed
        weight: Any = module.weight
        return weight.shape[0], weight.shape[1]
    return None


def freeze_weights(model: nn.Module, also_trained: Collection[str]) -> None:
    """Nothing but the adapters is trained, and modules of these names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith((A, B)) or name.split(".")[0] in also_trained


def find_frozen_products(model: nn.Module) -> list[nn.Parameter]:
    """Frozen weights of linear layers that nothing else uses, as an embedding would, and that the library does not
    want in fp32. Autocast makes them bf16 in each pass: those that are kept in bf16 give the very same numbers."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    library: Any = model
    wide = {*(library._keep_in_fp32_modules or ()), *(library._keep_in_fp32_modules_strict or ())}
    weights = [
        cast(nn.Parameter, m.weight) for n, m in model.named_modules() if linear_sides(m) and not wide & {*n.split(".")}
    ]
    return [weight for weight in weights if not weight.requires_grad and uses[id(weight)] == 1]


def iter_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have adapters, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowRank))


@torch.no_grad()
def merge_adapter(weight: Tensor, module: Any) -> Tensor:
    """The weight of a layer with its adapter added: what a model without adapters needs to give the same."""
    added = module.lora_scale * (module.lora_B.double() @ module.lora_A.double())
    if not isinstance(module, nn.Linear):
        added = added.T
    return (weight.double() + added).to(weight.dtype)
