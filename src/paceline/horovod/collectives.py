"""Horovod's collectives, blocking (differentiable), asynchronous and grouped.

torch.distributed matches collectives by order, the same on every rank, and not by `name=`, which must not be used
twice at a time. As in Horovod, the gradient of what every rank holds a copy of (gathered or broadcast) is averaged over
ranks: a loss that all of them compute from it counts once.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from paceline.horovod import async_ops as ops
from paceline.horovod.async_ops import Average, Compression, Handle, Operation, ReduceRule, Sum
from paceline.horovod.world import AnySet, ProcessSet, rank, require_global_set

P = ParamSpec("P")
T = TypeVar("T")
Name = str | None
Compress = type[ops.Compressor]


class Factors(TypedDict, total=False):
    """Keyword arguments of the reductions."""

    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def _resolve_rule(op: Operation | None, average: bool | None, factors: Factors) -> ReduceRule:
    require_global_set(factors.get("process_set"))
    return ops.resolve_rule(op, average, factors.get("prescale_factor", 1.0), factors.get("postscale_factor", 1.0))


class _Received(torch.autograd.Function):
    """What a collective returned; `back` makes of its gradient that of the tensor that was sent."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        ctx.mark_dirty(received)  # so that it is no view, which could not be changed in place
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def _attach_gradient(sent: Tensor, received: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    if sent.requires_grad and torch.is_grad_enabled():
        return _Received.apply(sent, received, back)
    return received


def _require_linear(rule: ReduceRule) -> ReduceRule:
    if rule.op not in (Average, Sum):
        raise RuntimeError(f"op=hvd.{rule.op.value} has no gradient; detach the tensor, or use hvd.Sum or hvd.Average")
    return rule


def _average(tensor: Tensor) -> Tensor:
    return ops.start_reduce(tensor, ReduceRule(Average)).wait()


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
    ops.require_same_call("allreduce", tensor, name, rule.op.value, rule.before, rule.after, compression)
    reduced = ops.start_reduce(tensor, rule, compression).wait()
    return _attach_gradient(
        tensor, reduced, lambda grad: ops.start_reduce(grad, _require_linear(rule), compression).wait()
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: Name = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[Tensor]:
    rule = _resolve_rule(op, average, factors)
    return ops.start_named("allreduce", name, lambda: ops.start_reduce(tensor, rule))


def allgather(tensor: Tensor, name: Name = None, process_set: AnySet = None) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension, which may differ between ranks."""
    require_global_set(process_set)
    shape = tensor.shape

    def back(grad: Tensor) -> Tensor:
        mine = shape[0] if shape else 1
        rows = ops.start_gather(torch.tensor([mine], device=grad.device)).wait().tolist()
        first = sum(rows[: rank()])
        return _average(grad)[first : first + mine].reshape(shape)

    return _attach_gradient(tensor, ops.start_gather(tensor).wait(), back)


def allgather_async(tensor: Tensor, name: Name = None, process_set: AnySet = None) -> Handle[Tensor]:
    require_global_set(process_set)
    return ops.start_named("allgather", name, lambda: ops.start_gather(tensor))


def broadcast(tensor: Tensor, root_rank: int, name: Name = None, process_set: AnySet = None) -> Tensor:
    """Return the tensor of the root."""
    require_global_set(process_set)
    ops.require_same_call("broadcast", tensor, root_rank, name)

    def back(grad: Tensor) -> Tensor:
        averaged = _average(grad)
        return averaged if rank() == root_rank else torch.zeros_like(averaged)

    return _attach_gradient(tensor, ops.start_broadcast(tensor, root_rank).wait(), back)


def broadcast_async(tensor: Tensor, root_rank: int, name: Name = None, process_set: AnySet = None) -> Handle[Tensor]:
    require_global_set(process_set)
    return ops.start_named("broadcast", name, lambda: ops.start_broadcast(tensor, root_rank))


def _in_place(
    start: Callable[Concatenate[Tensor, P], Handle[Tensor]],
) -> Callable[Concatenate[Tensor, P], Handle[Tensor]]:
    """Return a collective that copies its result over the tensor that was sent."""

    @functools.wraps(start)
    def call(tensor: Tensor, *args: P.args, **options: P.kwargs) -> Handle[Tensor]:
        handle = start(tensor, *args, **options)
        return Handle(handle.works, lambda: torch.no_grad()(tensor.copy_)(handle.wait()))

    return call


def _blocking(start: Callable[P, Handle[T]]) -> Callable[P, T]:
    """Return a collective that waits for its result."""

    @functools.wraps(start)
    def call(*args: P.args, **options: P.kwargs) -> T:
        ops.require_same_call(start.__name__.removesuffix("_async"), *args, options)
        return start(*args, **options).wait()

    return call


def grouped_allreduce(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Return what `allreduce` of each tensor does."""
    return [allreduce(tensor, *args, **options) for tensor in tensors]


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
        works = [work for handle in handles for work in handle.works]
        return Handle(works, lambda: [handle.wait() for handle in handles])

    return call


allreduce_async_, broadcast_async_ = _in_place(allreduce_async), _in_place(broadcast_async)
allreduce_, broadcast_ = _blocking(allreduce_async_), _blocking(broadcast_async_)
grouped_allreduce_async, grouped_allreduce_async_ = _grouped_async(allreduce_async), _grouped_async(allreduce_async_)
grouped_allreduce_ = _blocking(grouped_allreduce_async_)
