"""Sharded data parallelism: ranks keep parts of parameters, gradients and optimiser state, and gather layer by layer.

| strategy | kept whole between forward and backward | torch |
|---|---|---|
| zero2 | all parameters | `fully_shard(reshard_after_forward=False)` |
| fsdp, zero3 | the layer at work | `fully_shard` |
| hsdp | the layer at work, in each of several copies | `fully_shard` on a mesh of two axes |
| ddp beside tensor or pipeline | everything | `fully_shard` over one rank, summed over the copies |
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline.errors import reject_value
from paceline.layout import Layout
from paceline.nn.experts import find_experts
from paceline.parallel.parameters import find_shared_parameters
from paceline.parallel.precision import HALF
from paceline.runlog.timers import CollectiveTimer

if TYPE_CHECKING:
    from paceline.parallel.parallelize import ModelSetup

M_MMAP_THRESHOLD = -3  # of malloc.h


def shard_model(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, setup: "ModelSetup", experts: DeviceMesh | None
) -> nn.Module:
    """Gather each block on its own, and free it after its forward pass; the rest (embedding, head) is kept.

    A pipeline keeps its layers, or it would gather them for every micro-batch. Divided experts are gathered on their
    own, among the ranks of the grid `experts` that hold the same ones.
    """
    parallel, summed_in = setup.spec.parallel, HALF.get(setup.spec.parallel.reduce, torch.float32)
    as_it_is = parallel.reduce == "exact" and setup.spec.train.weights == "fp32"
    if parallel.wrap != "layers":
        blocks = find_units(model, parallel.wrap)
    layout, in_bf16 = setup.layout, setup.workload.casts_layers and setup.spec.train.precision in ("bf16", "fp8")
    reject_unshardable(model, blocks, layout)
    layer_by_layer = layout.strategy in ("fsdp", "hsdp") and layout.pipeline == 1 and mesh["shard"].size() > 1
    if layer_by_layer and mesh.device_type == "cpu":
        return_freed_memory()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it would move gathered weights away, for cuDNN
            module.flatten_parameters = _leave_in_place  # type: ignore[method-assign]
    options: dict[str, Any] = {}
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    mixtures = find_experts(model) if experts is not None else []
    divided = {p for module in mixtures for p in module.parameters()}
    inside = {p for block in blocks for p in block.parameters()}
    cast = inside - {p for block in blocks for p in find_uncast(block)} if in_bf16 else inside
    for module in (model, *blocks, *mixtures):  # the rest first: it gathers what layers have in fp32
        policy = MixedPrecisionPolicy(reduce_dtype=None if as_it_is else summed_in)
        if in_bf16 and module is not model:  # autocast casts what goes in, as under every other strategy
            policy = MixedPrecisionPolicy(torch.bfloat16, summed_in, cast_forward_inputs=False)
        keep = module is model or not layer_by_layer
        others = cast | divided if module is model else {p for p in module.parameters() if p not in cast} | divided
        grid = mesh
        if experts is not None and module in mixtures:
            grid, others = experts, set()
        axes = grid["replicate", "shard"] if grid["replicate"].size() > 1 else grid["shard"]
        if grid is experts and axes.size() == 1:
            continue  # over one rank their gradients would be scaled
        wrapped = fully_shard(
            module, mesh=axes, **options, mp_policy=policy, reshard_after_forward=not keep, ignored_params=others
        )
        if axes.size() > 1:
            wrapped.set_gradient_divide_factor(1.0)  # the loss is divided by global counts
            wrapped.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu":
            wrapped.set_custom_all_gather(_timed(DefaultAllGather, setup.timer))
            wrapped.set_custom_reduce_scatter(_timed(DefaultReduceScatter, setup.timer))
    return model


def return_freed_memory() -> None:
    """Set the allocator of this process to return gathered layers on CPU cores: glibc keeps blocks between others."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 19)


def _leave_in_place() -> None:
    """Leave the weights of a recurrent layer where they are; cuDNN copies them in each pass."""


def find_uncast(block: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters that autocast leaves: of norms and tables, and numbers beside products."""
    for module in block.modules():
        own = list(module.named_parameters(recurse=False))
        product = any(p.ndim > 2 or (p.ndim == 2 and name.endswith("weight")) for name, p in own)
        if not product or isinstance(module, nn.Embedding):
            yield from (p for _, p in own)


def find_units(model: nn.Module, least: int) -> list[nn.Module]:
    """Find modules with at least so many parameters, those of units inside not counted."""
    units: list[nn.Module] = []
    ends = () if isinstance(model, nn.Sequential) else [m for m in model.children() if not any(m.children())]

    def count_left(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(count_left, module.children()))
        whole = module is model or module in ends or isinstance(module, nn.ModuleList | nn.ModuleDict)
        if whole or left < least:
            return left
        units.append(module)
        return 0

    count_left(model)
    return units


def reject_unshardable(model: nn.Module, blocks: Sequence[nn.Module], layout: Layout) -> None:
    """Raise UserError for what `fully_shard` cannot take."""
    advice = "and are gathered one by one; give the Workload a method  blocks(model)  without them, or use ddp"
    reasons = [f"layers {i} and {j} share {name}, {advice}" for name, i, j in find_shared_parameters(blocks)]
    scalars = [name for name, p in model.named_parameters() if not p.ndim]
    reasons += [f"{name} is a single number and cannot be divided; make it of shape [1]" for name in scalars]
    for reason in reasons:
        raise reject_value("parallel.strategy", layout.strategy, reason)


def _timed(collective: Any, timer: CollectiveTimer) -> Any:
    """Time a collective; on a CPU nothing else is done meanwhile."""

    class Timed(collective):
        __call__ = timer.blocking()(collective.__call__)

    return Timed()
