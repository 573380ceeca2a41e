"""Reducing, gathering, broadcasting and exchanging tensors, each at once or under way; gradients go through the former.

Names of operations are taken and not used: torch.distributed pairs collectives by their order, which must be the same
on every rank, where Horovod pairs them by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.horovod import autograd
from paceline.horovod.async_ops import (
    start_alltoall,
    start_broadcast,
    start_gather,
    start_reduce,
    start_reduce_scatter,
    start_sparse_reduce,
)
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.handles import Handle
from paceline.horovod.reduction import Average, Operation, ReduceRule, resolve_rule
from paceline.horovod.unsupported import ProcessSet, require_global_set
from paceline.horovod.world import size


class Factors(TypedDict, total=False):
    """What the reductions take by name only."""

    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def _rule(op: Operation | None, average: bool | None, factors: Factors) -> ReduceRule:
    require_global_set(factors.get("process_set"))
    return resolve_rule(op, average, factors.get("prescale_factor", 1.0), factors.get("postscale_factor", 1.0))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> torch.Tensor:
    """The average over ranks, or what `op` says."""
    rule = _rule(op, average, factors)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.Reduced.apply(tensor, rule, compression)
    return start_reduce(tensor, rule, compression).wait()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> torch.Tensor:
    return allreduce_async_(tensor, average, name, op, **factors).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[torch.Tensor]:
    return start_reduce(tensor, _rule(op, average, factors))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[torch.Tensor]:
    handle = start_reduce(tensor, _rule(op, average, factors))
    return _into(tensor, handle)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation = Average, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Of a sparse tensor: rows are gathered instead of summed."""
    require_global_set(process_set)
    return start_sparse_reduce(tensor, resolve_rule(op, None))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """All ranks' tensors along the first dimension, which alone may differ between them."""
    require_global_set(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.Gathered.apply(tensor)
    return start_gather(tensor).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    require_global_set(process_set)
    return start_gather(tensor)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """What the root has, as a new tensor."""
    require_global_set(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.Broadcast.apply(tensor, root_rank)
    return start_broadcast(tensor, root_rank).wait()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    require_global_set(process_set)
    return start_broadcast(tensor, root_rank)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    require_global_set(process_set)
    return _into(tensor, start_broadcast(tensor, root_rank))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rows to each rank and from each: with `splits`, how many to whom, also how many came from whom."""
    require_global_set(process_set)
    to = _splits(tensor, splits)
    if tensor.requires_grad and torch.is_grad_enabled():
        received, counts = autograd.Exchanged.apply(tensor, to)
    else:
        received, counts = start_alltoall(tensor, to).wait()
    if splits is None:
        return received
    return received, counts.to(splits.device) if isinstance(splits, torch.Tensor) else counts


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[torch.Tensor] | Handle[tuple[torch.Tensor, torch.Tensor]]:
    require_global_set(process_set)
    under_way = start_alltoall(tensor, _splits(tensor, splits))
    return under_way if splits is not None else Handle(under_way.works, lambda: under_way.wait()[0])


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> list[int]:
    if splits is None:
        if len(tensor) % size():
            raise UserError(f"{len(tensor)} rows cannot be divided evenly over {size()} ranks; give splits=")
        return [len(tensor) // size()] * size()
    if isinstance(splits, torch.Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise UserError(f"splits= is a tensor of {splits.dtype}; use whole numbers, torch.int32")
    to = [int(count) for count in splits]
    if len(to) != size() or sum(to) != len(tensor) or min(to) < 0:
        raise UserError(f"splits={to} do not divide {len(tensor)} rows over {size()} ranks; they must add up to them")
    return to


def reducescatter(
    tensor: torch.Tensor,
    compression: type[Compressor] = Compression.none,
    name: str | None = None,
    op: Operation = Average,
    **factors: Unpack[Factors],
) -> torch.Tensor:
    """This rank's part of the reduced tensor, along the first dimension; the first ranks have one row more."""
    rule = _rule(op, None, factors)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.Scattered.apply(tensor, rule, compression)
    return start_reduce_scatter(tensor, rule, compression).wait()


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation = Average, **factors: Unpack[Factors]
) -> Handle[torch.Tensor]:
    return start_reduce_scatter(tensor, _rule(op, None, factors))


def barrier(process_set: ProcessSet | None = None) -> None:
    require_global_set(process_set)
    if size() > 1:
        dist.barrier()


def _into(tensor: torch.Tensor, handle: Handle[torch.Tensor]) -> Handle[torch.Tensor]:
    """The result put in the place of what was sent."""
    return Handle(handle.works, lambda: _copied(tensor, handle.wait()))


def _copied(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(value)
