"""Broadcast parameters, optimiser state and objects; batch normalisation over all ranks."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import UserError
from paceline.horovod import collectives
from paceline.horovod.async_ops import Sum, require_same_call
from paceline.horovod.collectives import Name
from paceline.horovod.world import AnySet, rank, require_global_set, size
from paceline.launch.process_group import gather_objects


def broadcast_object(obj: Any = None, root_rank: int = 0, name: Name = None, process_set: AnySet = None) -> Any:
    """Return the object of the root, which must be picklable."""
    require_global_set(process_set)
    box = [obj]
    if size() > 1:
        dist.broadcast_object_list(box, root_rank)
    return box[0]


def allgather_object(obj: Any, name: Name = None, process_set: AnySet = None) -> list[Any]:
    require_global_set(process_set)
    return gather_objects(obj) if size() > 1 else [obj]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: AnySet = None
) -> None:
    """Overwrite `model.state_dict()`, `model.named_parameters()` or tensors by those of the root."""
    require_global_set(process_set)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise UserError(f"broadcast_parameters: give model.state_dict(), not a {type(params).__name__}")
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    values = [pair[1] if isinstance(pair, tuple) else pair for pair in pairs]
    tensors = [value for value in values if isinstance(value, Tensor)]
    require_same_call("broadcast_parameters", tensors, root_rank)
    for handle in [collectives.broadcast_async_(tensor, root_rank) for tensor in tensors]:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Replace state and settings of the optimiser on all ranks by those of the root."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("the state of torch.optim.LBFGS cannot be broadcast; use another optimiser")
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad and parameter.grad is None and parameter not in optimizer.state:
            parameter.grad = torch.zeros_like(parameter)  # as Horovod leaves it, which makes a first step of zeros
    if size() == 1:
        return
    state: Any = optimizer.state_dict() if rank() == root_rank else None
    rest = tree_map_only(Tensor, lambda t: partial(torch.empty, t.shape, dtype=t.dtype, device=t.device.type), state)
    rest = broadcast_object(rest, root_rank)
    if rank() != root_rank:
        state = tree_map_only(partial, lambda make_empty: make_empty(), rest)
    broadcast_parameters([leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)], root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """In training, mean and variance are those of all ranks' samples; in evaluation, the running ones.

    As in torch, half precision is normalised in float32 and comes out as it came in.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or input.device.type == "cuda" or size() == 1:
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        over = [dimension for dimension in range(input.dim()) if dimension != 1]
        own = values.new_tensor([input.numel() // input.shape[1]])
        count = collectives.allreduce(own, op=Sum)
        mean = collectives.allreduce(values.sum(over), op=Sum) / count
        centred = values - _by_channel(mean, input)
        variance = collectives.allreduce(centred.square().sum(over), op=Sum) / count
        self._update_running_stats(mean.detach(), variance.detach(), count)
        normal = centred * _by_channel(torch.rsqrt(variance + self.eps), input)
        if self.affine:
            normal = normal * _by_channel(self.weight, input) + _by_channel(self.bias, input)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running values, with the unbiased variance, as torch keeps them."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / (count - 1), share)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
