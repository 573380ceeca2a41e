"""Expert parallelism: ranks with other samples divide the experts, and send each token to the ranks that have its own.

| | dense weights | experts |
|---|---|---|
| held by | every data-parallel rank, whole or as a shard | the ranks of `expert`, consecutive experts each |
| gradients summed over | all data- and context-parallel ranks | those that hold the same experts |

An expert sees the tokens of all ranks of its group, so that its gradients are sums over them already. An expert for all
tokens is computed while they travel.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.nn.experts import Compute, find_experts, run_experts
from paceline.parallel.exchange import Exchange, Started, arrive, depart
from paceline.runlog.timers import CollectiveTimer


def divide_experts(model: nn.Module, mesh: DeviceMesh, timer: CollectiveTimer) -> None:
    """Replace the experts of a model by this rank's, and send tokens to the ranks of theirs in each forward pass."""
    group = ExpertGroup(mesh, timer)
    # not compiled: asks how many tokens each rank gets
    dispatch = torch.compiler.disable(group.send), torch.compiler.disable(group.compute)
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

    def send(self, sorted_ND: Tensor, counts_E: Tensor) -> "TokensOnTheWay":
        """Start to send tokens, sorted by expert, to the ranks of their experts."""
        theirs = torch.empty_like(counts_E)
        with self.timer.blocking():
            dist.all_to_all_single(theirs, counts_E, group=self.group)
        theirs = theirs.view(self.ranks, -1)  # from each rank, for each expert of this one
        sent, received = counts_E.view(self.ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        ahead, home = partial(self._exchange, received, sent), partial(self._exchange, sent, received)
        there, back = Exchange(ahead, home, self.timer), Exchange(home, ahead, self.timer)
        (departed,) = depart([there], [sorted_ND])
        return TokensOnTheWay(departed, there, back, theirs)

    def compute(self, tokens: "TokensOnTheWay", compute: Compute) -> Tensor:
        """Return the results of the tokens' experts, in the order in which they were sent."""
        theirs = tokens.counts_RE
        arrived = arrive(tokens.there, tokens.sent)
        experts = torch.arange(theirs.shape[1], device=theirs.device).repeat(self.ranks)
        order = experts.repeat_interleave(theirs.flatten()).argsort(stable=True)  # by rank and expert -> by expert
        computed = compute(arrived[order], theirs.sum(0))
        (sent,) = depart([tokens.back], [torch.empty_like(computed).index_copy(0, order, computed)])
        return arrive(tokens.back, sent)

    def _exchange(self, received: list[int], sent: list[int], x: Tensor) -> Started:
        out = x.new_empty(sum(received), *x.shape[1:])
        return out, dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)


@dataclass(frozen=True, eq=False)
class TokensOnTheWay:
    sent: Tensor
    there: Exchange
    back: Exchange
    counts_RE: Tensor  # from each rank, for each expert of this one
