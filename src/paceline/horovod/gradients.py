"""What the backward pass sends where the forward pass sent something.

As in Horovod, the gradient of what every rank holds a copy of (gathered or broadcast) is averaged over ranks, so that
a loss that all of them compute from it counts once.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.horovod import sending
from paceline.horovod.compression import Compressor
from paceline.horovod.reduction import Average, Rule, Sum, multiplied
from paceline.horovod.world import rank, size


def _linear(rule: Rule) -> Rule:
    if rule.op not in (Average, Sum):
        raise RuntimeError(f"op=hvd.{rule.op.value} has no gradient; detach the tensor, or use hvd.Sum or hvd.Average")
    return rule


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rule: Rule, compression: type[Compressor]) -> torch.Tensor:
        ctx.rule, ctx.compression = rule, compression
        return sending.reduce(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return sending.reduce(grads[0], _linear(ctx.rule), ctx.compression).wait(), None, None


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.shape = tensor.shape
        return sending.gather(tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine = ctx.shape[0] if ctx.shape else 1
        rows = sending.gather(torch.tensor([mine], device=grads[0].device)).wait().tolist()
        first = sum(rows[: rank()])
        return sending.reduce(grads[0], Rule(Average)).wait()[first : first + mine].reshape(ctx.shape)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        return sending.send(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        averaged = sending.reduce(grads[0], Rule(Average)).wait()
        return (averaged if rank() == ctx.root_rank else torch.zeros_like(averaged)), None


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, to: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        received, counts = sending.exchange(tensor, to).wait()
        ctx.counts = counts.tolist()
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return sending.exchange(grads[0], ctx.counts).wait()[0], None


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rule: Rule, compression: type[Compressor]) -> torch.Tensor:
        ctx.rule = rule
        return sending.scatter(tensor, rule, compression).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rule = _linear(ctx.rule)
        factor = rule.before * rule.after * (1 if rule.op is Average else size())
        return multiplied(sending.gather(grads[0]).wait(), factor), None, None
