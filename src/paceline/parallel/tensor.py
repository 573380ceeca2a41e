"""Tensor parallelism: matrix products divided over ranks, by the workload's table of shard rules, over DTensor.

| rule | what is divided | with `sequence` |
|---|---|---|
| column | rows of the weight, so columns of the output | |
| row | columns of the weight; outputs are summed | summed into parts of the sequence |
| gather | nothing: the input of a group of columns, so that its gradients are summed once | parts become whole |
| sequence | nothing | works on a part of the sequence |
| vocabulary | rows of an embedding or of a head that computes its own loss | as for row and gather |
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, parallel

from paceline.errors import invalid_workload, reject_value
from paceline.nn.chunked_loss import compute_chunked_losses, split_vocabulary

RULES = ("column", "row", "gather", "sequence", "vocabulary")
ALONG = 1  # the axis of positions in (samples, positions, features)


def apply_tensor_parallel(model: nn.Module, rules: Mapping[str, str], mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Apply the table of shard rules; modules that no pattern names stay whole on every rank."""
    plan = {}
    for name, module in model.named_modules():
        rule = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
        if rule is None and sequence and next(module.parameters(recurse=False), None) is not None:
            reason = f"no shard rule names {name!r}, whose weights would see a part of the sequence only"
            hint = f"add  {name!r}: 'sequence'  to shard_rules, or use false"
            raise reject_value("parallel.sequence", "true", f"{reason}; {hint}")
        if rule is not None and (style := _choose_style(rule, module, sequence)) is not None:
            plan[name] = style
    return parallel.parallelize_module(model, mesh, plan)


def _choose_style(rule: str, module: nn.Module, sequence: bool) -> parallel.ParallelStyle | None:
    outside: Placement = Shard(ALONG) if sequence else Replicate()
    match rule:
        case "column":
            return parallel.ColwiseParallel()
        case "row":
            return parallel.RowwiseParallel(output_layouts=outside)
        case "gather":
            return parallel.PrepareModuleInput(
                input_layouts=(outside,), desired_input_layouts=(Replicate(),), use_local_output=False
            )
        case "sequence":
            return parallel.SequenceParallel(sequence_dim=ALONG, use_local_output=True) if sequence else None
        case "vocabulary" if isinstance(module, nn.Embedding):
            return parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
        case "vocabulary":
            return _VocabularyHead(outside)
    raise invalid_workload("shard_rules", f"the rule {rule!r} is not known; use one of {', '.join(RULES)}")


class _VocabularyHead(parallel.ParallelStyle):
    """A head of which each rank has some rows of the vocabulary."""

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, ranks, rank = device_mesh.get_group(), device_mesh.size(), device_mesh.get_local_rank()

        def losses(x_BSD: Tensor, weight_VD: Any, targets_BS: Tensor) -> Tensor:
            first, _ = split_vocabulary(weight_VD.shape[0], ranks, rank)
            return compute_chunked_losses(x_BSD, weight_VD.to_local(), targets_BS, group=group, first=first)

        def gathered(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(inputs[0], device_mesh, [self.outside], run_check=False)
            return x.redistribute(placements=[Replicate()]).to_local(), *inputs[1:]

        if isinstance(weight := module.weight, nn.Parameter):
            shared = distribute_tensor(weight.data, device_mesh, [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(shared, requires_grad=weight.requires_grad)
        cast(Any, module).losses = losses
        if self.outside != Replicate():
            module.register_forward_pre_hook(gathered)
        return module


def wait_for_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wait before a compiled layer: a sum over ranks in flight would lose its gradient there."""
    return tuple(_Arrived.apply(x) if isinstance(x, AsyncCollectiveTensor) else x for x in inputs)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
