"""ZeRO-1: every rank holds the model and all gradients, and each updates its own part of every parameter.

The parts are rows, as in every other sharded layout, so that checkpoints do not know the difference. After the update
the parts are gathered, many parameters in one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.parallel.local_parameters import LocalParameter, LocalParameters
from paceline.record.timers import CollectiveTimer

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def shard_update(model: nn.Module, mesh: DeviceMesh, bucket_mb: float, timer: CollectiveTimer) -> LocalParameters:
    """The rows that this rank updates of a model which every rank holds whole."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gather = _gather([p for _, p in named], mesh, int(bucket_mb * 1e6), timer)
    return LocalParameters([_rows(name, p, mesh) for name, p in named], dist.group.WORLD, gather)


def _rows(name: str, param: nn.Parameter, mesh: DeviceMesh) -> LocalParameter:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    divisible = param.ndim > 0

    def cut(like: Tensor) -> Tensor:
        if not divisible:
            return like.detach()
        begin, count = _mine(like.shape[0], rank, ranks)
        return like.detach().narrow(0, begin, count)

    def whole(local: Tensor) -> Tensor:
        if not divisible or local.shape != data.shape:
            return local
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride())

    data = cut(param)
    return LocalParameter(name, param, data, 1 if divisible else ranks, cut, whole)


def _mine(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first row, number of rows) of a rank: equal parts rounded up, the last ones shorter or empty."""
    each = -(-rows // ranks)
    begin = min(rank * each, rows)
    return begin, min(each, rows - begin)


def _gather(
    params: list[nn.Parameter], mesh: DeviceMesh, bucket_bytes: int, timer: CollectiveTimer
) -> Callable[[], None]:
    """Gives each rank the rows that the others have updated."""
    buckets = list(_buckets([p for p in params if p.ndim > 0], bucket_bytes))
    ranks = mesh.size()
    group = mesh.get_group()

    @torch.no_grad()
    def gather() -> None:
        for bucket in buckets:
            parts = [[p.narrow(0, *_mine(p.shape[0], rank, ranks)) for rank in range(ranks)] for p in bucket]
            room = sum(-(-p.shape[0] // ranks) * p[0].numel() for p in bucket)
            mine = torch.zeros(room, dtype=bucket[0].dtype, device=bucket[0].device)
            _copy([own[mesh.get_local_rank()] for own in parts], mine, into=True)
            everyone = mine.new_empty(ranks * room)
            with timer.blocking():
                ALL_GATHER(everyone, mine, group=group)
            for rank, row in enumerate(everyone.view(ranks, room)):
                if rank != mesh.get_local_rank():
                    _copy([own[rank] for own in parts], row, into=False)

    return gather


def _copy(parts: list[Tensor], flat: Tensor, into: bool) -> None:
    begin = 0
    for part in parts:
        place = flat[begin : begin + part.numel()].view(part.shape)
        (place if into else part).copy_(part if into else place)
        begin += part.numel()


def _buckets(params: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one type, about that many bytes at a time."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for p in params:
        if bucket and (filled >= bucket_bytes or p.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(p)
        filled += p.nbytes
    if bucket:
        yield bucket
