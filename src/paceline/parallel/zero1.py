"""ZeRO-1: every rank holds the model and all gradients, and each updates its own part of every parameter.

The parts are rows, as in every other sharded layout, so that checkpoints do not know the difference. After the update
the parts are gathered, many parameters in one collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.parallel.flat import buckets, copy_parts, flattened
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
    together = list(buckets([p for p in params if p.ndim > 0], bucket_bytes))
    ranks, me, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()

    @torch.no_grad()
    def gather() -> None:
        for bucket in together:
            rows = [[p.narrow(0, *_mine(p.shape[0], rank, ranks)) for p in bucket] for rank in range(ranks)]
            room = sum(-(-p.shape[0] // ranks) * p[0].numel() for p in bucket)
            own = flattened(rows[me])
            mine = F.pad(own, (0, room - len(own)))
            everyone = mine.new_empty(ranks * room)
            with timer.blocking():
                ALL_GATHER(everyone, mine, group=group)
            for rank, flat in enumerate(everyone.view(ranks, room)):
                if rank != me:
                    copy_parts(flat, rows[rank])

    return gather
