"""Broadcast parameters, optimiser state and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.horovod import collectives
from paceline.horovod.unsupported import ProcessSet, require_global_set
from paceline.horovod.world import rank, size
from paceline.launch.process_group import gather_objects


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the object of the root, which must be picklable."""
    require_global_set(process_set)
    box = [obj]
    if size() > 1:
        dist.broadcast_object_list(box, root_rank)
    return box[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    require_global_set(process_set)
    return gather_objects(obj) if size() > 1 else [obj]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet | None = None
) -> None:
    """Overwrite `model.state_dict()`, `model.named_parameters()` or tensors by those of the root."""
    require_global_set(process_set)
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise UserError(f"broadcast_parameters: give model.state_dict(), not a {type(params).__name__}")
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    values = [pair[1] if isinstance(pair, tuple) else pair for pair in pairs]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for handle in [collectives.broadcast_async_(tensor, root_rank) for tensor in tensors]:
        handle.wait()


class _Tensor(NamedTuple):
    """Placeholder of a tensor that is sent separately."""

    shape: torch.Size
    dtype: torch.dtype
    kind: str  # of its device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.kind)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Replace state and settings of the optimiser on all ranks by those of the root."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("the state of torch.optim.LBFGS cannot be broadcast; use another optimiser")
    if size() == 1:
        return
    tensors: list[torch.Tensor] = []
    if rank() == root_rank:
        broadcast_object(_extract_tensors(optimizer.state_dict(), tensors), root_rank)
    else:
        received = _insert_tensors(broadcast_object(None, root_rank), tensors)
    broadcast_parameters(tensors, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(received)


def _extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(value.shape, value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _extract_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_extract_tensors(inner, tensors) for inner in value)
    return value


def _insert_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace each placeholder by an empty tensor to receive into."""
    if isinstance(value, _Tensor):
        tensors.append(value.empty())
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _insert_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_insert_tensors(inner, tensors) for inner in value)
    return value
