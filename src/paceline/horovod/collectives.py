"""Horovod's collectives, blocking (differentiable), asynchronous and grouped.

torch.distributed matches collectives by order, which must be the same on every rank, and not by `name=`: a name only
must not be used twice at the same time. As in Horovod, the gradient of what every rank holds a copy of (gathered or
broadcast) is averaged over ranks, so that a loss that all of them compute from it counts once.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UserError
from paceline.horovod import async_ops as ops
from paceline.horovod.async_ops import (
    Average,
    Compression,
    Compressor,
    Handle,
    Operation,
    ReduceRule,
    Sum,
    resolve_rule,
    scale_buffer,
)
from paceline.horovod.world import AnySet, ProcessSet, barrier_group, rank, require_global_set, size

P = ParamSpec("P")
T = TypeVar("T")
Name = str | None
Splits = Tensor | Sequence[int] | None
Compress = type[Compressor]


class Factors(TypedDict, total=False):
    """Keyword arguments of the reductions."""

    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def _resolve_rule(op: Operation | None, average: bool | None, factors: Factors) -> ReduceRule:
    require_global_set(factors.get("process_set"))
    return resolve_rule(op, average, factors.get("prescale_factor", 1.0), factors.get("postscale_factor", 1.0))


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    compression: Compress = Compression.none,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Tensor:
    """Return the average over ranks, or the reduction `op`."""
    rule = _resolve_rule(op, average, factors)
    if _needs_gradient(tensor):
        return AllReduce.apply(tensor, rule, compression)
    return ops.start_reduce(tensor, rule, compression).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[Tensor]:
    rule = _resolve_rule(op, average, factors)
    return ops.start_named("allreduce", name, lambda: ops.start_reduce(tensor, rule))


def sparse_allreduce_async(
    tensor: Tensor, name: Name = None, op: Operation = Average, process_set: AnySet = None
) -> Handle[Tensor]:
    """Reduce a sparse tensor by gathering its rows."""
    require_global_set(process_set)
    return ops.start_sparse_reduce(tensor, resolve_rule(op, None))


def allgather(tensor: Tensor, name: Name = None, process_set: AnySet = None) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, which may differ between ranks."""
    require_global_set(process_set)
    return AllGather.apply(tensor) if _needs_gradient(tensor) else ops.start_gather(tensor).wait()


def allgather_async(tensor: Tensor, name: Name = None, process_set: AnySet = None) -> Handle[Tensor]:
    require_global_set(process_set)
    return ops.start_named("allgather", name, lambda: ops.start_gather(tensor))


def broadcast(tensor: Tensor, root_rank: int, name: Name = None, process_set: AnySet = None) -> Tensor:
    """Return the tensor of the root."""
    require_global_set(process_set)
    if _needs_gradient(tensor):
        return Broadcast.apply(tensor, root_rank)
    return ops.start_broadcast(tensor, root_rank).wait()


def broadcast_async(tensor: Tensor, root_rank: int, name: Name = None, process_set: AnySet = None) -> Handle[Tensor]:
    require_global_set(process_set)
    return ops.start_named("broadcast", name, lambda: ops.start_broadcast(tensor, root_rank))


def alltoall(
    tensor: Tensor, splits: Splits = None, name: Name = None, process_set: AnySet = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Exchange rows between all ranks; with `splits` (rows per receiver), also return rows per sender."""
    require_global_set(process_set)
    to = _resolve_splits(tensor, splits)
    if _needs_gradient(tensor):
        received, counts = AllToAll.apply(tensor, to)
    else:
        received, counts = ops.start_alltoall(tensor, to).wait()
    if splits is None:
        return received
    return received, counts.to(splits.device) if isinstance(splits, Tensor) else counts


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: Name = None, process_set: AnySet = None
) -> Handle[Tensor] | Handle[tuple[Tensor, Tensor]]:
    require_global_set(process_set)
    handle = ops.start_alltoall(tensor, _resolve_splits(tensor, splits))
    return handle if splits is not None else Handle(handle.works, lambda: handle.wait()[0])


def _resolve_splits(tensor: Tensor, splits: Splits) -> list[int]:
    """Return the rows for each receiver."""
    if splits is None:
        if len(tensor) % size():
            raise UserError(f"{len(tensor)} rows cannot be divided evenly over {size()} ranks; give splits=")
        return [len(tensor) // size()] * size()
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise UserError(f"splits= is a tensor of {splits.dtype}; use whole numbers, torch.int32")
    to = [int(count) for count in splits]
    if len(to) != size() or sum(to) != len(tensor) or min(to) < 0:
        raise UserError(f"splits={to} do not divide {len(tensor)} rows over {size()} ranks; they must add up to them")
    return to


def reducescatter(
    tensor: Tensor,
    compression: Compress = Compression.none,
    name: Name = None,
    op: Operation = Average,
    **factors: Unpack[Factors],
) -> Tensor:
    """Return this rank's rows of the reduced tensor; the first ranks have one more."""
    rule = _resolve_rule(op, None, factors)
    if _needs_gradient(tensor):
        return ReduceScatter.apply(tensor, rule, compression)
    return ops.start_reduce_scatter(tensor, rule, compression).wait()


def reducescatter_async(
    tensor: Tensor, name: Name = None, op: Operation = Average, **factors: Unpack[Factors]
) -> Handle[Tensor]:
    rule = _resolve_rule(op, None, factors)
    return ops.start_named("reducescatter", name, lambda: ops.start_reduce_scatter(tensor, rule))


def barrier(process_set: AnySet = None) -> None:
    require_global_set(process_set)
    if size() > 1:
        dist.barrier(barrier_group())


def _in_place(
    start: Callable[Concatenate[Tensor, P], Handle[Tensor]],
) -> Callable[Concatenate[Tensor, P], Handle[Tensor]]:
    """Return a collective that copies its result over the tensor that was sent."""

    @functools.wraps(start)
    def call(tensor: Tensor, *args: P.args, **options: P.kwargs) -> Handle[Tensor]:
        handle = start(tensor, *args, **options)
        return Handle(handle.works, lambda: _overwrite(tensor, handle.wait()))

    return call


@torch.no_grad()
def _overwrite(tensor: Tensor, value: Tensor) -> Tensor:
    return tensor.copy_(value)


def _blocking(start: Callable[P, Handle[T]]) -> Callable[P, T]:
    """Return a collective that waits for its result."""

    @functools.wraps(start)
    def call(*args: P.args, **options: P.kwargs) -> T:
        return start(*args, **options).wait()

    return call


def _grouped(start: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Sequence[Tensor], P], list[T]]:
    """Return a collective of several tensors."""

    @functools.wraps(start)
    def call(tensors: Sequence[Tensor], *args: P.args, **options: P.kwargs) -> list[T]:
        return [start(tensor, *args, **options) for tensor in tensors]

    return call


def _grouped_async(
    start: Callable[Concatenate[Tensor, P], Handle[T]],
) -> Callable[Concatenate[Sequence[Tensor], P], Handle[list[T]]]:
    """Return a collective of several tensors with one handle."""

    @functools.wraps(start)
    def call(tensors: Sequence[Tensor], *args: P.args, **options: P.kwargs) -> Handle[list[T]]:
        bound = [inspect.signature(start).bind(tensor, *args, **options) for tensor in tensors]
        for index, call in enumerate(bound):
            if call.arguments.get("name") is not None:
                call.arguments["name"] = f"{call.arguments['name']}.{index}"
        handles = [start(*call.args, **call.kwargs) for call in bound]
        return Handle([work for handle in handles for work in handle.works], lambda: [each.wait() for each in handles])

    return call


allreduce_async_, broadcast_async_ = _in_place(allreduce_async), _in_place(broadcast_async)
allreduce_, broadcast_ = _blocking(allreduce_async_), _blocking(broadcast_async_)
grouped_allreduce_async, grouped_allreduce_async_ = _grouped_async(allreduce_async), _grouped_async(allreduce_async_)
grouped_allreduce, grouped_allreduce_ = _grouped(allreduce), _blocking(grouped_allreduce_async_)
grouped_allgather, grouped_allgather_async = _grouped(allgather), _grouped_async(allgather_async)
grouped_reducescatter = _grouped(reducescatter)
grouped_reducescatter_async = _grouped_async(reducescatter_async)


def _require_linear(rule: ReduceRule) -> ReduceRule:
    if rule.op not in (Average, Sum):
        raise RuntimeError(f"op=hvd.{rule.op.value} has no gradient; detach the tensor, or use hvd.Sum or hvd.Average")
    return rule


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Tensor:
        ctx.rule, ctx.compression = rule, compression
        return ops.start_reduce(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ops.start_reduce(grads[0], _require_linear(ctx.rule), ctx.compression).wait(), None, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return ops.start_gather(tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mine = ctx.shape[0] if ctx.shape else 1
        rows = ops.start_gather(torch.tensor([mine], device=grads[0].device)).wait().tolist()
        first = sum(rows[: rank()])
        return ops.start_reduce(grads[0], ReduceRule(Average)).wait()[first : first + mine].reshape(ctx.shape)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int) -> Tensor:
        ctx.root_rank = root_rank
        return ops.start_broadcast(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        averaged = ops.start_reduce(grads[0], ReduceRule(Average)).wait()
        return (averaged if rank() == ctx.root_rank else torch.zeros_like(averaged)), None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to: list[int]) -> tuple[Tensor, Tensor]:
        received, counts = ops.start_alltoall(tensor, to).wait()
        ctx.counts = counts.tolist()
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ops.start_alltoall(grads[0], ctx.counts).wait()[0], None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Tensor:
        ctx.rule = rule
        return ops.start_reduce_scatter(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rule = _require_linear(ctx.rule)
        factor = rule.before * rule.after * (1 if rule.op is Average else size())
        return scale_buffer(ops.start_gather(grads[0]).wait(), factor), None, None
