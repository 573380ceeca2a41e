"""Start collectives over torch.distributed, without gradients, and wait for their handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.horovod.reduction import OPERATIONS, Compression, Compressor, ReduceRule
from paceline.horovod.world import rank, size

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective in flight; the result is computed once, on the first `wait`."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T]) -> None:
        """Hold the `works` of torch.distributed: none in a world of one."""
        self.works = works
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> T:
        if self._finish is not None:
            for work in self.works:
                work.wait()
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    __call__ = wait


def poll(handle: Handle[Any]) -> bool:
    return handle.done()


def synchronize(handle: Handle[T]) -> T:
    return handle.wait()


def combine_handles(handles: Sequence[Handle[T]]) -> Handle[list[T]]:
    return Handle([work for handle in handles for work in handle.works], lambda: [handle.wait() for handle in handles])


SENT_AS = {torch.int16: torch.int32}  # neither gloo nor NCCL sends this type
DIMENSIONS = 8  # of the tensors whose shapes are compared


def start_reduce(
    tensor: torch.Tensor, rule: ReduceRule, compression: type[Compressor] = Compression.none
) -> Handle[torch.Tensor]:
    """Start reducing a copy of the tensor."""
    if tensor.is_sparse:
        return start_sparse_reduce(tensor, rule)
    return start_reduce_buffer(tensor.detach().clone(memory_format=torch.contiguous_format), rule, compression)


def start_reduce_buffer(buffer: torch.Tensor, rule: ReduceRule, compression: type[Compressor]) -> Handle[torch.Tensor]:
    """Start reducing a contiguous buffer, which may be overwritten."""
    sent, context = compression.compress(_sendable(rule.scale(buffer)))
    works = [dist.all_reduce(sent, OPERATIONS[rule.op], async_op=True)] if size() > 1 else []
    ranks, dtype = size(), buffer.dtype
    return Handle(works, lambda: rule.finish(compression.decompress(sent, context), ranks).to(dtype))


def start_sparse_reduce(tensor: torch.Tensor, rule: ReduceRule) -> Handle[torch.Tensor]:
    if OPERATIONS[rule.op] is not dist.ReduceOp.SUM:
        raise UserError(f"op=hvd.{rule.op.value}: sparse tensors are summed or averaged; use hvd.Sum or hvd.Average")
    mine = tensor.detach().coalesce()
    shape, ranks = mine.shape, size()
    indices, values = start_gather(mine.indices().t().contiguous()), start_gather(rule.scale(mine.values().clone()))

    def finish() -> torch.Tensor:
        summed = torch.sparse_coo_tensor(indices.wait().t(), values.wait(), shape, check_invariants=False).coalesce()
        finished = rule.finish(summed.values(), ranks)
        return torch.sparse_coo_tensor(summed.indices(), finished, shape, is_coalesced=True, check_invariants=False)

    return Handle([*indices.works, *values.works], finish)


def start_gather(tensor: torch.Tensor) -> Handle[torch.Tensor]:
    mine = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    if size() == 1:
        return Handle([], mine.clone)
    rows = gather_row_counts(mine)
    padded = _sendable(mine).new_zeros((max(rows), *mine.shape[1:]))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in rows]
    work = dist.all_gather(parts, padded, async_op=True)

    def finish() -> torch.Tensor:
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).to(mine.dtype)

    return Handle([work], finish)


def gather_row_counts(mine: torch.Tensor) -> list[int]:
    """Return the rows of each rank; raise on ranks whose tensors do not match, instead of hanging."""
    if mine.dim() > DIMENSIONS:
        raise UserError(f"a tensor of {mine.dim()} dimensions cannot be gathered; use at most {DIMENSIONS}")
    kind = torch.empty(0, dtype=mine.dtype).element_size() * (1 if mine.is_floating_point() else -1)
    about = [len(mine), kind, mine.dim(), *mine.shape[1:]]
    sent = torch.tensor([*about, *[0] * (DIMENSIONS + 2 - len(about))], device=mine.device)
    everyone = [torch.empty_like(sent) for _ in range(size())]
    dist.all_gather(everyone, sent)
    shapes = [other.tolist() for other in everyone]
    if any(other[1:] != shapes[0][1:] for other in shapes):
        raise RuntimeError(
            f"the tensors differ between ranks in type or beyond the first dimension; here {list(mine.shape)}"
        )
    return [other[0] for other in shapes]


def start_broadcast(tensor: torch.Tensor, root_rank: int) -> Handle[torch.Tensor]:
    if not 0 <= root_rank < size():
        raise UserError(f"root_rank={root_rank} is not one of the {size()} ranks; they count from 0")
    sent = _sendable(tensor.detach().clone(memory_format=torch.contiguous_format))
    works = [dist.broadcast(sent, root_rank, async_op=True)] if size() > 1 else []
    return Handle(works, lambda: sent.to(tensor.dtype))


def start_alltoall(tensor: torch.Tensor, to: list[int]) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
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
    tensor: torch.Tensor, rule: ReduceRule, compression: type[Compressor] = Compression.none
) -> Handle[torch.Tensor]:
    if not tensor.dim():
        raise UserError("a single number has no first dimension to scatter; use hvd.allreduce")
    whole, part = start_reduce(tensor, rule, compression), slice_own_rows(len(tensor))
    return Handle(whole.works, lambda: whole.wait()[part].clone())


def slice_own_rows(rows: int) -> slice:
    each, more = divmod(rows, size())
    first = rank() * each + min(rank(), more)
    return slice(first, first + each + (rank() < more))


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(SENT_AS.get(tensor.dtype, tensor.dtype))
