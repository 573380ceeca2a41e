"""Broadcast parameters, optimiser state and objects."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm as SyncBatchNorm
from torch.utils._pytree import tree_map_only

from paceline.horovod import collectives
from paceline.horovod.async_ops import require_same_call
from paceline.horovod.collectives import Name
from paceline.horovod.world import AnySet, require_global_set, size
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
    if size() > 1:
        on_host = tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict())
        optimizer.load_state_dict(broadcast_object(on_host, root_rank))
