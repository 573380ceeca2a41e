"""Expert parallelism: ranks with other samples divide the experts, and send each token to the ranks that have its own.

| | dense weights | experts |
|---|---|---|
| held by | every data-parallel rank, whole or as a shard | the ranks of `expert`, consecutive experts each |
| gradients summed over | all data- and context-parallel ranks | those that hold the same experts |

An expert sees the tokens of all ranks of its group, so that its gradients are sums over them already.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.nn.experts import Compute, find_experts, run_experts
from paceline.runlog.timers import CollectiveTimer


def divide_experts(model: nn.Module, mesh: DeviceMesh, timer: CollectiveTimer) -> None:
    """Leave each rank its experts, and let tokens go where theirs are."""
    dispatch = torch.compiler.disable(ExpertGroup(mesh, timer).dispatch)  # asks how many tokens each rank gets
    for module in find_experts(model):
        cast(Any, module).num_experts = len(cast(Tensor, module.gate_up_proj))
        for name, weight in list(module.named_parameters()):
            part = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))
        cast(Any, module).forward = partial(run_experts, module, dispatch)


class ExpertGroup:
    """The ranks that divide the experts, as one of them sees it."""

    def __init__(self, mesh: DeviceMesh, timer: CollectiveTimer) -> None:
        self.group, self.ranks, self.timer = mesh.get_group(), mesh.size(), timer

    def dispatch(self, sorted_ND: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """Send tokens, sorted by expert, to the ranks of their experts; return the results in the same order."""
        theirs = torch.empty_like(counts_E)
        with self.timer.blocking():
            dist.all_to_all_single(theirs, counts_E, group=self.group)
        theirs = theirs.view(self.ranks, -1)  # from each rank, for each expert of this one
        sent, received = counts_E.view(self.ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = _Exchange.apply(sorted_ND, received, sent, self)
        experts = torch.arange(theirs.shape[1], device=theirs.device).repeat(self.ranks)
        order = experts.repeat_interleave(theirs.flatten()).argsort(stable=True)  # by rank and expert -> by expert
        computed = compute(arrived[order], theirs.sum(0))
        return _Exchange.apply(torch.empty_like(computed).index_copy(0, order, computed), sent, received, self)


class _Exchange(torch.autograd.Function):
    """Rows to and from each rank; backward sends gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], ranks: ExpertGroup) -> Tensor:
        ctx.splits, ctx.ranks = (received, sent), ranks
        return _send(x, received, sent, ranks)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.splits
        return _send(incoming[0], sent, received, ctx.ranks), None, None, None


def _send(x: Tensor, received: list[int], sent: list[int], ranks: ExpertGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    with ranks.timer.blocking():
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=ranks.group)
    return out
