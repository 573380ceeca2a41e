"""Horovod's collectives, blocking (differentiable), asynchronous and grouped.

`name=` is accepted and ignored: torch.distributed matches collectives by order, which must be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.horovod import autograd
from paceline.horovod.async_ops import (
    Handle,
    combine_handles,
    start_alltoall,
    start_broadcast,
    start_gather,
    start_reduce,
    start_reduce_scatter,
    start_sparse_reduce,
)
from paceline.horovod.reduction import Average, Compression, Compressor, Operation, ReduceRule, resolve_rule
from paceline.horovod.unsupported import ProcessSet, require_global_set
from paceline.horovod.world import size


class Factors(TypedDict, total=False):
    """Keyword arguments of the reductions."""

    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def _resolve_rule(op: Operation | None, average: bool | None, factors: Factors) -> ReduceRule:
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
    """Return the average over ranks, or the reduction `op`."""
    rule = _resolve_rule(op, average, factors)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.AllReduce.apply(tensor, rule, compression)
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
    return start_reduce(tensor, _resolve_rule(op, average, factors))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[torch.Tensor]:
    handle = start_reduce(tensor, _resolve_rule(op, average, factors))
    return _copy_into(tensor, handle)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation = Average, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Reduce a sparse tensor by gathering its rows."""
    require_global_set(process_set)
    return start_sparse_reduce(tensor, resolve_rule(op, None))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, which may differ between ranks."""
    require_global_set(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.AllGather.apply(tensor)
    return start_gather(tensor).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    require_global_set(process_set)
    return start_gather(tensor)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Return the tensor of the root."""
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
    return _copy_into(tensor, start_broadcast(tensor, root_rank))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows between all ranks; with `splits` (rows per receiver), also return rows per sender."""
    require_global_set(process_set)
    to = _resolve_splits(tensor, splits)
    if tensor.requires_grad and torch.is_grad_enabled():
        received, counts = autograd.AllToAll.apply(tensor, to)
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
    under_way = start_alltoall(tensor, _resolve_splits(tensor, splits))
    return under_way if splits is not None else Handle(under_way.works, lambda: under_way.wait()[0])


def _resolve_splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> list[int]:
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
    """Return this rank's rows of the reduced tensor; the first ranks have one more."""
    rule = _resolve_rule(op, None, factors)
    if tensor.requires_grad and torch.is_grad_enabled():
        return autograd.ReduceScatter.apply(tensor, rule, compression)
    return start_reduce_scatter(tensor, rule, compression).wait()


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Operation = Average, **factors: Unpack[Factors]
) -> Handle[torch.Tensor]:
    return start_reduce_scatter(tensor, _resolve_rule(op, None, factors))


def barrier(process_set: ProcessSet | None = None) -> None:
    require_global_set(process_set)
    if size() > 1:
        dist.barrier()


def _copy_into(tensor: torch.Tensor, handle: Handle[torch.Tensor]) -> Handle[torch.Tensor]:
    """Copy the result over the tensor that was sent."""
    return Handle(handle.works, lambda: _copied(tensor, handle.wait()))


def _copied(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(value)


Tensors = Sequence[torch.Tensor]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    if compression is not Compression.none or any(tensor.requires_grad for tensor in tensors):
        return [allreduce(tensor, average, name, compression, op, **factors) for tensor in tensors]
    return grouped_allreduce_async(tensors, average, name, op, **factors).wait()


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    return grouped_allreduce_async_(tensors, average, name, op, **factors).wait()


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[list[torch.Tensor]]:
    return combine_handles([allreduce_async(tensor, average, name, op, **factors) for tensor in tensors])


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[list[torch.Tensor]]:
    return combine_handles([allreduce_async_(tensor, average, name, op, **factors) for tensor in tensors])


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    return [allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[torch.Tensor]]:
    return combine_handles([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_reducescatter(
    tensors: Tensors,
    compression: type[Compressor] = Compression.none,
    name: str | None = None,
    op: Operation = Average,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    return [reducescatter(tensor, compression, name, op, **factors) for tensor in tensors]


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: Operation = Average, **factors: Unpack[Factors]
) -> Handle[list[torch.Tensor]]:
    return combine_handles([reducescatter_async(tensor, name, op, **factors) for tensor in tensors])
