"""Collectives with gradients.

As in Horovod, the gradient of what every rank holds a copy of (gathered or broadcast) is averaged over ranks, so that
a loss that all of them compute from it counts once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.horovod import async_ops
from paceline.horovod.reduction import Average, Compressor, ReduceRule, Sum, scale_buffer
from paceline.horovod.world import rank, size


def _require_linear(rule: ReduceRule) -> ReduceRule:
    if rule.op not in (Average, Sum):
        raise RuntimeError(f"op=hvd.{rule.op.value} has no gradient; detach the tensor, or use hvd.Sum or hvd.Average")
    return rule


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Tensor:
        ctx.rule, ctx.compression = rule, compression
        return async_ops.start_reduce(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return async_ops.start_reduce(grads[0], _require_linear(ctx.rule), ctx.compression).wait(), None, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return async_ops.start_gather(tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mine = ctx.shape[0] if ctx.shape else 1
        rows = async_ops.start_gather(torch.tensor([mine], device=grads[0].device)).wait().tolist()
        first = sum(rows[: rank()])
        return async_ops.start_reduce(grads[0], ReduceRule(Average)).wait()[first : first + mine].reshape(ctx.shape)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int) -> Tensor:
        ctx.root_rank = root_rank
        return async_ops.start_broadcast(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        averaged = async_ops.start_reduce(grads[0], ReduceRule(Average)).wait()
        return (averaged if rank() == ctx.root_rank else torch.zeros_like(averaged)), None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to: list[int]) -> tuple[Tensor, Tensor]:
        received, counts = async_ops.start_alltoall(tensor, to).wait()
        ctx.counts = counts.tolist()
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return async_ops.start_alltoall(grads[0], ctx.counts).wait()[0], None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rule: ReduceRule, compression: type[Compressor]) -> Tensor:
        ctx.rule = rule
        return async_ops.start_reduce_scatter(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rule = _require_linear(ctx.rule)
        factor = rule.before * rule.after * (1 if rule.op is Average else size())
        return scale_buffer(async_ops.start_gather(grads[0]).wait(), factor), None, None
