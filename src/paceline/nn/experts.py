"""Mixtures of experts: a router sends each token to some of many feed-forward parts, and drops none."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED = getattr(F, "grouped_mm", None)
Compute = Callable[[Tensor, Tensor], Tensor]  # of tokens sorted by expert, and how many each expert gets
Dispatch = tuple[Callable[[Tensor, Tensor], Any], Callable[[Any, Compute], Tensor]]
"""Sends tokens to the ranks that have their experts, and returns what these compute."""


class Experts(nn.Module):
    """Gated feed-forward parts, their weights as transformers stores them."""

    def __init__(self, experts: int, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, ffn))
        self.act_fn: Callable[[Tensor], Tensor] = F.silu

    def forward(
        self, x_TD: Tensor, chosen_Tk: Tensor, scores_Tk: Tensor, beside: Callable[[], Tensor] | None = None
    ) -> Tensor:
        return run_experts(self, None, x_TD, chosen_Tk, scores_Tk, beside)


def balance_by_bias(models: Sequence[Any], several: bool, wait: Callable[[], AbstractContextManager[object]]) -> None:
    """Update the biases of experts after a step, by the tokens of each expert, all-reduced over ranks."""
    if not models:
        return
    load_LE = sum(model.expert_load for model in models)
    if several and dist.is_initialized():
        with wait():
            dist.all_reduce(load_LE)
    for model in models:
        model.balance_experts(load_LE)


@contextmanager
def count_choices(parts: Sequence[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that gets the tokens of each expert, by the name of the mixture."""
    found: dict[str, Tensor] = {}

    def count(name: str, experts: Any, given: tuple[Any, ...]) -> None:
        size = getattr(experts, "num_experts", 0) or len(experts.gate_up_proj)
        found[name] = found.get(name, 0) + torch.bincount(given[1].flatten(), minlength=size)

    mixtures = {module for part in parts for module in find_experts(part)}
    named = [(name, module) for part in parts for name, module in part.named_modules() if module in mixtures]
    hooks = [module.register_forward_pre_hook(partial(count, name)) for name, module in named]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def summarize_loads(loads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of each expert in every mixture, and the busiest's of its own."""
    if not loads:
        return {}
    rows = [loads[name] for name in sorted(loads, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])]
    shares = [row / max(row.sum(), 1) for row in rows]
    return {
        "busiest_expert": max(float(share.max() * len(share)) for share in shares),
        "expert_load": [share.tolist() for share in shares],
    }


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Find modules that hold experts, ours and those of transformers."""
    return [module for module in model.modules() if {n for n, p in module.named_parameters()} == NAMES]


NAMES = {"gate_up_proj", "down_proj"}


def run_experts(
    experts: Any,
    dispatch: Dispatch | None,
    x_TD: Tensor,
    chosen_Tk: Tensor,
    scores_Tk: Tensor,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return the weighted outputs of each token's experts; `dispatch` if ranks divide them.

    What `beside` computes is added: it hides the way of tokens to other ranks.
    """
    chosen = chosen_Tk.flatten()
    order = chosen.argsort(stable=True)  # by expert, then by token
    ours = len(experts.gate_up_proj) if dispatch is None else experts.num_experts
    counts_E = chosen.new_zeros(ours).scatter_add(0, chosen, torch.ones_like(chosen))  # compiled, bincount has no size
    sent_ND = x_TD[order // chosen_Tk.shape[1]]

    def compute(x: Tensor, counts: Tensor) -> Tensor:
        gate, up = multiply_by_expert(x, _local(experts.gate_up_proj), counts).chunk(2, -1)
        return multiply_by_expert(experts.act_fn(gate) * up, _local(experts.down_proj), counts)

    if dispatch is None:
        found_ND = compute(sent_ND, counts_E)
        other_TD = None if beside is None else beside()
    else:
        send, finish = dispatch
        travelling = send(sent_ND, counts_E)
        other_TD = None if beside is None else beside()
        found_ND = finish(travelling, compute)
    back_TkD = torch.empty_like(found_ND).index_copy(0, order, found_ND).unflatten(0, chosen_Tk.shape)
    out_TD = (back_TkD * scores_Tk[..., None]).sum(1).to(x_TD.dtype)
    return out_TD if other_TD is None else out_TD + other_TD


def _local(weight: Any) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def multiply_by_expert(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """Return the product of each token, sorted by expert, with the expert's weight."""
    kind = choose_product_type(x_ND, weight_EFD)
    x_ND, weight_EFD = x_ND.to(kind), weight_EFD.to(kind)
    if GROUPED is not None and x_ND.is_cuda and x_ND.dtype == torch.bfloat16:
        ends = counts_E.cumsum(0).to(torch.int32)
        return GROUPED(x_ND.contiguous(), weight_EFD.transpose(1, 2), offs=ends)
    compiled = torch.compiler.is_compiling()  # a decorator would import the compiler
    multiply = torch.compiler.disable(_multiply_parts) if compiled else _multiply_parts
    return multiply(x_ND, weight_EFD, counts_E)


def choose_product_type(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type in which autocast would multiply; without it, that of the weight."""
    if torch.is_autocast_enabled(x.device.type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def _multiply_parts(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    parts = x_ND.split(counts_E.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EFD.unbind(), strict=True)])
