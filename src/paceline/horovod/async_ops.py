"""Start collectives over torch.distributed, without gradients, and wait for their handles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UserError
from paceline.horovod.reduction import OPERATIONS, Compression, Compressor, ReduceRule
from paceline.horovod.world import rank, size
from paceline.launch.process_group import gather_objects

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective in flight; the result is computed once, on the first `wait`."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        """Hold the `works` of torch.distributed: none in a world of one."""
        self.works, self._finish = works, finish

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    @functools.cached_property
    def _result(self) -> T:
        for work in self.works:
            work.wait()
        return self._finish()

    def wait(self) -> T:
        return self._result

    __call__ = wait


def poll(handle: Handle[Any]) -> bool:
    return handle.done()


def synchronize(handle: Handle[T]) -> T:
    return handle.wait()


SENT_AS = {torch.int16: torch.int32}  # neither gloo nor NCCL sends this type


def start_reduce(tensor: Tensor, rule: ReduceRule, compression: type[Compressor] = Compression.none) -> Handle[Tensor]:
    """Start reducing a copy of the tensor."""
    if tensor.is_sparse:
        return start_sparse_reduce(tensor, rule)
    return start_reduce_buffer(tensor.detach().clone(memory_format=torch.contiguous_format), rule, compression)


def start_reduce_buffer(buffer: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Handle[Tensor]:
    """Start reducing a contiguous buffer, which may be overwritten."""
    sent, context = compression.compress(_sendable(rule.scale(buffer)))
    works = [dist.all_reduce(sent, OPERATIONS[rule.op], async_op=True)] if size() > 1 else []
    ranks, dtype = size(), buffer.dtype
    return Handle(works, lambda: rule.finish(compression.decompress(sent, context), ranks).to(dtype))


def start_sparse_reduce(tensor: Tensor, rule: ReduceRule) -> Handle[Tensor]:
    if OPERATIONS[rule.op] is not dist.ReduceOp.SUM:
        raise UserError(f"op=hvd.{rule.op.value}: sparse tensors are summed or averaged; use hvd.Sum or hvd.Average")
    mine = tensor.detach().coalesce()
    shape, ranks = mine.shape, size()
    indices, values = start_gather(mine.indices().t().contiguous()), start_gather(rule.scale(mine.values().clone()))

    def finish() -> Tensor:
        summed = torch.sparse_coo_tensor(indices.wait().t(), values.wait(), shape, check_invariants=False).coalesce()
        finished = rule.finish(summed.values(), ranks)
        return torch.sparse_coo_tensor(summed.indices(), finished, shape, is_coalesced=True, check_invariants=False)

    return Handle([*indices.works, *values.works], finish)


def start_gather(tensor: Tensor) -> Handle[Tensor]:
    mine = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    if size() == 1:
        return Handle([], mine.clone)
    rows = gather_row_counts(mine)
    padded = _sendable(mine).new_zeros((max(rows), *mine.shape[1:]))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in rows]
    work = dist.all_gather(parts, padded, async_op=True)

    def finish() -> Tensor:
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).to(mine.dtype)

    return Handle([work], finish)


def gather_row_counts(mine: Tensor) -> list[int]:
    """Return the rows of each rank; raise on ranks whose tensors do not match, instead of hanging."""
    shapes = gather_objects((tuple(mine.shape), mine.dtype))
    if len({(shape[1:], dtype) for shape, dtype in shapes}) > 1:
        raise RuntimeError(
            f"the tensors differ between ranks in type or beyond the first dimension; here {list(mine.shape)}"
        )
    return [shape[0] for shape, _ in shapes]


def start_broadcast(tensor: Tensor, root_rank: int) -> Handle[Tensor]:
    if not 0 <= root_rank < size():
        raise UserError(f"root_rank={root_rank} is not one of the {size()} ranks; they count from 0")
    sent = _sendable(tensor.detach().clone(memory_format=torch.contiguous_format))
    works = [dist.broadcast(sent, root_rank, async_op=True)] if size() > 1 else []
    return Handle(works, lambda: sent.to(tensor.dtype))


def start_alltoall(tensor: Tensor, to: list[int]) -> Handle[tuple[Tensor, Tensor]]:
    mine = tensor.detach()
    if size() == 1:
        return Handle([], lambda: (mine.clone(), torch.tensor(to, dtype=torch.int32)))
    gather_row_counts(mine)
    counts = start_gather(torch.tensor([to], device=mine.device)).wait()[:, rank()].tolist()
    sent = _sendable(mine.contiguous())
    received = sent.new_empty((sum(counts), *mine.shape[1:]))
    work = dist.all_to_all_single(received, sent, counts, to, async_op=True)
    return Handle([work], lambda: (received.to(mine.dtype), torch.tensor(counts, dtype=torch.int32)))


def start_reduce_scatter(
    tensor: Tensor, rule: ReduceRule, compression: type[Compressor] = Compression.none
) -> Handle[Tensor]:
    if not tensor.dim():
        raise UserError("a single number has no first dimension to scatter; use hvd.allreduce")
    whole, ranks, mine = start_reduce(tensor, rule, compression), size(), rank()
    return Handle(whole.works, lambda: whole.wait().tensor_split(ranks)[mine].clone())


def _sendable(tensor: Tensor) -> Tensor:
    return tensor.to(SENT_AS.get(tensor.dtype, tensor.dtype))
