"""What is reduced and how, and collectives over torch.distributed without gradients."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.errors import UserError
from paceline.horovod.world import barrier_group, in_flight, raise_no_adasum, size
from paceline.launch.process_group import gather_objects

T = TypeVar("T")


class Compressor:
    """Send tensors as they are; scripts may bring their own class with these methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors in 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """Values of `compression=`."""

    none = Compressor
    fp16 = FP16Compressor


class Operation(Enum):
    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum = Operation.AVERAGE, Operation.SUM, Operation.ADASUM
Min, Max, Product = Operation.MIN, Operation.MAX, Operation.PRODUCT
OPERATIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class ReduceRule:
    """An operation with the factors before and after it."""

    op: Operation
    before: float = 1.0
    after: float = 1.0

    def finish(self, buffer: Tensor, ranks: int) -> Tensor:
        """Scale the received buffer, in place if it is floating point."""
        if self.op is Average:
            in_place = buffer.is_floating_point() or buffer.is_complex()
            buffer = buffer.div_(ranks) if in_place else (buffer.double() / ranks).to(buffer.dtype)
        return scale_buffer(buffer, self.after)


def scale_buffer(buffer: Tensor, factor: float) -> Tensor:
    """Scale in the type of the buffer, in place if it is floating point; integers go through float64."""
    if factor == 1.0:
        return buffer
    in_place = buffer.is_floating_point() or buffer.is_complex()
    return buffer.mul_(factor) if in_place else (buffer.double() * factor).to(buffer.dtype)


def resolve_rule(op: Operation | None, average: bool | None, before: float = 1.0, after: float = 1.0) -> ReduceRule:
    """Resolve `op` and its older form `average`."""
    if op is not None and average is not None:
        raise UserError("average= is the older name of op=; give one of them, op=hvd.Sum or op=hvd.Average")
    if op is None:
        op = Sum if average is False else Average
    if op is Adasum:
        raise_no_adasum()
    if not isinstance(op, Operation):
        raise UserError(f"op={op!r} is not a reduction; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return ReduceRule(op, before, after)


class Handle(Generic[T]):
    """The `works` of a collective in flight, none in a world of one; the first `wait` computes the result."""

    name = ""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        self.works, self._finish = works, finish

    def done(self) -> bool:
        """Return whether the collective has completed; on one rank, compute it and return True from the second call."""
        if self.works:
            return all(work.is_completed() for work in self.works)
        computed = "_result" in vars(self)
        self.wait()
        return computed

    @functools.cached_property
    def _result(self) -> T:
        for work in self.works:
            work.wait()
        in_flight.pop(self.name, None)
        return self._finish()

    def wait(self) -> T:
        return self._result


def start_named(kind: str, name: str | None, start: Callable[[], Handle[T]]) -> Handle[T]:
    """Start a collective, unless another one of this kind and name is in flight."""
    if name is None:
        return start()
    if (key := f"{kind}.{name}") in in_flight:
        raise UserError(f"name={name!r}: {kind} of this name is in flight; call hvd.synchronize on its handle first")
    handle = in_flight[key] = start()
    handle.name = key
    return handle


def require_same_call(kind: str, *given: Any) -> None:
    """Raise on all ranks unless they make the same call, since torch.distributed would abort, wait or sum wrongly."""
    if size() == 1 or not dist.is_gloo_available():
        return
    leaves = tree_leaves(given)
    call = [kind, *(f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else str(x) for x in leaves)]
    calls = gather_objects(call, barrier_group())
    odd = next((number for number, other in enumerate(calls) if other != calls[0]), 0)
    if odd:
        pairs = zip_longest(calls[odd], calls[0], fillvalue="nothing")
        theirs, ours = next((theirs, ours) for theirs, ours in pairs if theirs != ours)
        raise RuntimeError(f"{kind}: rank {odd} gives {theirs} and rank 0 {ours}; every rank must make the same calls")


poll, synchronize = Handle.done, Handle.wait
SENT_AS = {torch.int16: torch.int32}  # neither gloo nor NCCL sends this type


def start_reduce(tensor: Tensor, rule: ReduceRule, compression: type[Compressor] = Compression.none) -> Handle[Tensor]:
    """Start reducing a copy of the tensor."""
    return start_reduce_buffer(tensor.detach().clone(memory_format=torch.contiguous_format), rule, compression)


def start_reduce_buffer(buffer: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Handle[Tensor]:
    """Start reducing a contiguous buffer, which may be overwritten."""
    sent, context = compression.compress(_cast_sendable(scale_buffer(buffer, rule.before)))
    works = [dist.all_reduce(sent, OPERATIONS[rule.op], async_op=True)] if size() > 1 else []
    ranks, dtype = size(), buffer.dtype
    return Handle(works, lambda: rule.finish(compression.decompress(sent, context), ranks).to(dtype))


def start_gather(tensor: Tensor) -> Handle[Tensor]:
    mine = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    if size() == 1:
        return Handle([], mine.clone)
    rows = gather_row_counts(mine)
    padded = _cast_sendable(mine).new_zeros((max(rows), *mine.shape[1:]))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in rows]
    work = dist.all_gather(parts, padded, async_op=True)
    return Handle(
        [work], lambda: torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).to(mine.dtype)
    )


def gather_row_counts(mine: Tensor) -> list[int]:
    """Return the rows of each rank; raise on all ranks if tensors differ in type or beyond the first dimension."""
    shapes = gather_objects((len(mine), str(mine.dtype), mine.shape[1:]), barrier_group())
    if any(other[1:] != shapes[0][1:] for other in shapes):
        here = f"here {list(mine.shape)}"
        raise RuntimeError(f"the tensors differ between ranks in type or beyond the first dimension; {here}")
    return [rows for rows, *_ in shapes]


def start_broadcast(tensor: Tensor, root_rank: int) -> Handle[Tensor]:
    sent = _cast_sendable(tensor.detach().clone(memory_format=torch.contiguous_format))
    works = [dist.broadcast(sent, root_rank, async_op=True)] if size() > 1 else []
    return Handle(works, lambda: sent.to(tensor.dtype))


def _cast_sendable(tensor: Tensor) -> Tensor:
    return tensor.to(SENT_AS.get(tensor.dtype, tensor.dtype))
