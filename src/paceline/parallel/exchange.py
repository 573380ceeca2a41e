"""Collectives that computing hides, with gradients: one departs, other work is done, and it arrives where it is needed.

The backward pass goes the other way: the gradient of what arrived is on its way back while gradients of the work are
computed, and where the tensor departed it is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runlog.timers import CollectiveTimer

Started = tuple[Tensor, dist.Work]  # what a collective fills, and what to wait for
Start = Callable[[Tensor], Started]


class Exchange:
    """A tensor on its way through the collective `there`, later its gradient on its way through `back`."""

    def __init__(self, there: Start, back: Start, timer: CollectiveTimer) -> None:
        self.there, self.back, self.timer = there, back, timer
        self._pending: tuple[Tensor, Started] | None = None

    def begin(self, start: Start, sent: Tensor) -> Tensor:
        """Start a collective; return the tensor that it will fill."""
        started = self.timer.now()
        filled, work = start(sent)
        self.timer.watch(started, work)
        self._pending = sent, (filled, work)  # kept, since it is read
        return filled

    def end(self) -> Tensor:
        assert self._pending is not None
        _, (filled, work) = self._pending
        self._pending = None
        with self.timer.blocking():
            work.wait()
        return filled


def depart(exchanges: Sequence[Exchange], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Start to send each tensor; return what `arrive` wants of each."""
    sent: tuple[Tensor, ...] = _Depart.apply(exchanges, *tensors)
    return sent


def arrive(exchange: Exchange, sent: Tensor) -> Tensor:
    """Wait for what an exchange brings."""
    found: Tensor = _Arrive.apply(exchange, sent)
    return found


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchanges: Sequence[Exchange], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchanges = exchanges
        for exchange, tensor in zip(exchanges, tensors, strict=True):
            exchange.begin(exchange.there, tensor.contiguous())
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(exchange.end() for exchange in ctx.exchanges)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, sent: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.begin(ctx.exchange.back, incoming[0].contiguous())  # filled where it departed
