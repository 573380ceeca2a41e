"""Data parallelism: every rank holds the model, gradients are summed in buckets while the backward pass goes on."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.layout import Layout
from paceline.record.timers import CollectiveTimer


def wrap(
    model: nn.Module,
    device: torch.device,
    bucket_mb: float,
    timer: CollectiveTimer,
    hook: Callable[..., torch.futures.Future[Tensor]] | None = None,
) -> DistributedDataParallel:
    """Broadcasts the model from rank 0 and sums (not averages) gradients: the loss is divided by global counts.

    `hook` takes the place of the exact sum.
    """
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )
    if hook is None:
        sum_gradients(wrapped, timer)
    else:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def sum_gradients(wrapped: DistributedDataParallel, timer: CollectiveTimer) -> None:
    """Let gradients be summed where DistributedDataParallel would take their mean, and note when."""

    def sum_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return sum_later(bucket.buffer(), timer, lambda summed: summed)

    wrapped.register_comm_hook(None, sum_bucket)


def sum_later(
    bucket: Tensor, timer: CollectiveTimer, result: Callable[[Tensor], Tensor]
) -> torch.futures.Future[Tensor]:
    """Begin to sum a bucket over ranks; `result` makes of the sum what the hook gives back."""
    started = timer.now()

    def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        timer.bucket_done(started)
        return result(future.value()[0])

    return dist.all_reduce(bucket, async_op=True).get_future().then(done)


def without_sync(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """No communication before the last micro-batch of a step."""
    return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()


def share_buffers(buffers: Iterable[Tensor], layout: Layout) -> None:
    """Running statistics and other buffers are each rank's own; the main rank's are the ones that count.

    The stages of a pipeline have different ones, and keep them.
    """
    if dist.is_initialized() and layout.pipeline == 1:
        for buffer in buffers:
            dist.broadcast(buffer, src=0)
