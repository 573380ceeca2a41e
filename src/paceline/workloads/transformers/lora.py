"""Low-rank adapters (LoRA, Hu et al. 2021): frozen weights, beside each a product of two thin matrices.

A linear layer keeps its place and its weight, and gets two parameters with the names of PEFT.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError, did_you_mean, reject_value
from paceline.nn.nf4 import BLOCK, NF4Linear, can_quantise, quantise_linear

A, B = "lora_A", "lora_B"


class LowRank(nn.Module):
    """Mixin of linear layers: y = layer(x) + scale · B A x."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def draw(self) -> None:
        """Draw A; B starts at zero, so that nothing changes at first."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


@cache
def make_low_rank_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"LowRank{kind.__name__}", (LowRank, kind), {})


def quantise_blocks(blocks: Sequence[nn.Module]) -> None:
    """Keep the weights of all linear layers of the blocks in 4 bits."""
    found = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    for module in (possible := [*filter(can_quantise, found)]):
        quantise_linear(module)
    if not possible:
        raise reject_value("model.quantize", "nf4", f"no linear layer has a multiple of {BLOCK} inputs; leave it out")


def add_adapters(blocks: Sequence[nn.Module], targets: Collection[str], rank: int, scale: float) -> None:
    """Add adapters to the linear layers of the blocks with these names; without names, to all."""
    linear = [(name, module) for block in blocks for name, module in block.named_modules() if linear_sides(module)]
    names = sorted({name.rpartition(".")[2] for name, _ in linear})
    for target in targets:
        if target not in names:
            known = f"{did_you_mean(target, names)} (linear layers: {', '.join(names)})"
            raise UserError(f"model.lora_targets: no linear layer {target!r}{known}", code="unknown-name")
    for name, module in linear:
        if targets and name.rpartition(".")[2] not in targets:
            continue
        found = linear_sides(module)
        assert found is not None
        weight: Any = module.weight
        for key, shape in ((A, (rank, found[0])), (B, (found[1], rank))):
            kind = weight.dtype if weight.is_floating_point() else torch.float32
            module.register_parameter(key, nn.Parameter(torch.empty(shape, dtype=kind, device=weight.device)))
        module.__class__ = make_low_rank_class(cast(Any, type(module)))
        module.lora_scale = scale


def linear_sides(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear | NF4Linear):
        return module.in_features, module.out_features
    if type(module).__name__ in ("Conv1D", "LowRankConv1D"):  # with a transposed weight
        weight: Any = module.weight
        return weight.shape[0], weight.shape[1]
    return None


def find_frozen_products(model: nn.Module) -> list[nn.Parameter]:
    """Return frozen weights of linear layers that autocast converts to bf16 in each pass anyway.

    Excluded are weights that an embedding shares, and those that the library keeps in fp32.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    library: Any = model
    wide = {*(library._keep_in_fp32_modules or ()), *(library._keep_in_fp32_modules_strict or ())}
    linear = [m for name, m in model.named_modules() if linear_sides(m) and not wide & {*name.split(".")}]
    weights = [cast(nn.Parameter, module.weight) for module in linear]
    frozen = (w for w in weights if w.is_floating_point() and not w.requires_grad)
    return [weight for weight in frozen if uses[id(weight)] == 1]


@torch.no_grad()
def merge_adapter(weight: Tensor, module: Any, down: Tensor, up: Tensor) -> Tensor:
    """Return the weight of a layer with its adapter added."""
    added = module.lora_scale * (up.double() @ down.double())
    if not isinstance(module, nn.Linear | NF4Linear):
        added = added.T
    return (weight.double() + added).to(weight.dtype)
