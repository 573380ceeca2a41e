"""Data parallelism where ranks hold the whole model; with ZeRO-1 each updates some rows."""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import RunFailed, UserError, join_names
from paceline.launch.process_group import gather_objects
from paceline.layout import Layout
from paceline.parallel.parameters import LocalParameter, LocalParameters, place_in_whole
from paceline.runlog.timers import CollectiveTimer

# No annotations from __future__ here: torch compares those of a hook with its own, as types.

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
AT_ONCE_BYTES = 25_000_000
SAME_WEIGHTS = 1e-3  # of the norm, by which sums may differ: other processors round otherwise
T = TypeVar("T", bound=Tensor)
SumFuture = torch.futures.Future[Tensor]
Hook = Callable[..., SumFuture]


def wrap_ddp(
    model: nn.Module, device: torch.device, bucket_mb: float, timer: CollectiveTimer, hook: Hook | None = None
) -> DistributedDataParallel:
    """Broadcast the model from rank 0 and sum (not average) gradients."""
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, hook or make_sum_hook(timer))
    return wrapped


def make_sum_hook(timer: CollectiveTimer) -> Hook:
    """Return a hook that sums gradients, which torch would average, and times it."""

    def sum_bucket(state: Any, bucket: dist.GradBucket) -> SumFuture:
        return start_sum(bucket.buffer(), timer)

    return sum_bucket


def start_sum(
    bucket: Tensor, timer: CollectiveTimer, result: Callable[[Tensor], Tensor] = lambda summed: summed
) -> SumFuture:
    """Start to sum a bucket over ranks; `result` turns the sum into what the hook returns."""
    started = timer.now()

    def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        timer.bucket_done(started)
        return result(future.value()[0])

    return dist.all_reduce(bucket, async_op=True).get_future().then(done)


def without_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Avoid communication before the last micro-batch of a step."""
    return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


def reject_unused_parameters(model: nn.Module, parameters: LocalParameters) -> None:
    """Raise RunFailed for parameters without a gradient; torch would a step later, by number."""
    if not isinstance(model, DistributedDataParallel):
        return
    if unused := [part.name for part in parameters if part.param.grad is None]:
        reason = f"workload: on several ranks every parameter must take part in the loss; {join_names(unused)} had"
        advice = "no gradient: use it in forward(), or freeze it with  requires_grad_(False)"
        raise RunFailed(f"{reason} {advice}", code="invalid-workload", key="loss")


def compare_first_weights(model: nn.Module) -> None:
    """Raise UserError on all ranks if one has drawn other weights: the run could not be repeated."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    mine, f64 = {}, torch.float64
    for name, p in model.named_parameters():
        if not p.is_meta and p.numel():
            flat = p.detach().flatten() if p.is_floating_point() else p.detach().flatten().double()
            norm = torch.linalg.vector_norm(flat, dtype=f64)
            mine[name] = float(flat.sum(dtype=f64)), float(flat[::2].sum(dtype=f64)), float(norm)
    (first_host, first), *others = gather_objects((socket.gethostname(), mine))
    for rank, (host, theirs) in enumerate(others, 1):
        for name in first | theirs:
            *own, size = first.get(name, (inf, inf, 0.0))
            other = theirs.get(name, (-inf, -inf))
            if any(abs(a - b) > SAME_WEIGHTS * size for a, b in zip(own, other[:2], strict=True)):
                both = f"rank {rank} ({host}) has drawn another {name} than rank 0 ({first_host})"
                advice = "draw weights from a generator that is seeded, as torch's is"
                raise UserError(f"ranks differ in model: {both}; {advice}", code="conflict", key="model")


def broadcast_model(model: nn.Module) -> None:
    """Start all ranks with the main rank's model: weights need not come from torch's generator."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)


def broadcast_buffers(buffers: Iterable[Tensor], layout: Layout) -> None:
    """Overwrite buffers by the main rank's; stages of a pipeline keep their own."""
    if dist.is_initialized() and layout.pipeline == 1:
        for buffer in buffers:
            dist.broadcast(buffer, src=0)


def split_into_buckets(tensors: Iterable[T], most_bytes: int = AT_ONCE_BYTES) -> Iterator[list[T]]:
    """Yield neighbours of one type, about that many bytes at a time."""
    bucket: list[T] = []
    for tensor in tensors:
        alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or sum(t.nbytes for t in bucket) >= most_bytes):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def copy_parts(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor, which may be longer, into tensors."""
    sizes = [t.numel() for t in tensors]
    for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def average_tensors(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over ranks; the same bits on all of them."""
    if not dist.is_initialized():
        return
    for bucket in split_into_buckets(tensors):
        flat = flatten_tensors(bucket)
        dist.all_reduce(flat)
        copy_parts(flat.div_(dist.get_world_size()), bucket)


def shard_update(model: nn.Module, mesh: DeviceMesh, bucket_mb: float, timer: CollectiveTimer) -> LocalParameters:
    """Return the rows that this rank updates of a model that every rank holds."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gather = _build_gather([p for _, p in named], mesh, int(bucket_mb * 1e6), timer)
    return LocalParameters([_wrap_rows(name, p, mesh) for name, p in named], dist.group.WORLD, gather)


def _wrap_rows(name: str, param: nn.Parameter, mesh: DeviceMesh) -> LocalParameter:
    from torch.distributed.tensor import Shard

    rank, ranks = mesh.get_local_rank(), mesh.size()
    if not param.ndim:
        return LocalParameter(name, param, param.detach(), ranks, torch.detach)

    def cut(like: Tensor) -> Tensor:
        return like.detach().narrow(0, *_own_rows(like.shape[0], rank, ranks))

    data = cut(param)
    return LocalParameter(name, param, data, 1, cut, partial(place_in_whole, mesh, [Shard(0)], data, param))


def _own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a rank; the last may be shorter or empty."""
    each = -(-rows // ranks)
    begin = min(rank * each, rows)
    return begin, min(each, rows - begin)


def _build_gather(
    params: list[nn.Parameter], mesh: DeviceMesh, bucket_bytes: int, timer: CollectiveTimer
) -> Callable[[], None]:
    together = list(split_into_buckets([p for p in params if p.ndim > 0], bucket_bytes))
    ranks, me, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()

    @torch.no_grad()
    def gather() -> None:
        for bucket in together:
            rows = [[p.narrow(0, *_own_rows(p.shape[0], rank, ranks)) for p in bucket] for rank in range(ranks)]
            room = sum(-(-p.shape[0] // ranks) * p[0].numel() for p in bucket)
            own = flatten_tensors(rows[me])
            mine = F.pad(own, (0, room - len(own)))
            everyone = mine.new_empty(ranks * room)
            with timer.blocking():
                ALL_GATHER(everyone, mine, group=group)
            for rank, flat in enumerate(everyone.view(ranks, room)):
                if rank != me:
                    copy_parts(flat, rows[rank])

    return gather
