"""Torch's fused Adam inside a CUDA graph, spread over the device.

Its kernel gives 65,536 numbers to each block of threads, so that the update of a small model keeps most of the device
idle and takes as long as one of a model thirty times as large. Here tensors are cut into smaller pieces, and calls on
some of them run side by side in a few streams. Every number becomes what one call on whole tensors would make of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 65_536
"""Numbers that the kernel gives to a block."""
PIECE = 16_384
TOGETHER = 36
"""Tensors that the kernel takes at once."""
STREAMS = 8

Piece = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of a parameter, its gradient and its two averages; and the number of its updates."""


def would_spread(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a graph is being recorded whose device has more processors than the kernel has blocks."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not (params and params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    blocks = sum(-(-p.numel() // BLOCK) for p in params)
    return blocks <= torch.cuda.get_device_properties(params[0].device).multi_processor_count


def spread_step(optimizer: Any) -> None:
    """What the `step` of a fused Adam or AdamW without amsgrad does, while a graph is recorded."""
    groups = [(group, list(_pieces(optimizer, group))) for group in optimizer.param_groups]
    counts = [optimizer.state[p]["step"] for group, _ in groups for p in group["params"] if p.grad is not None]
    torch._foreach_add_(counts, 1)
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    used = 0
    for group, pieces in groups:
        for first in range(0, len(pieces), TOGETHER):
            stream = streams[used % STREAMS]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                _update(optimizer, group, pieces[first : first + TOGETHER])
            used += 1
    for stream in streams[:used]:
        here.wait_stream(stream)
    torch._foreach_sub_(counts, [optimizer.found_inf] * len(counts))


def _pieces(optimizer: Any, group: dict[str, Any]) -> Iterator[Piece]:
    for p in group["params"]:
        if p.grad is None:
            continue
        kept = optimizer.state[p]
        whole = (p.detach(), p.grad, kept["exp_avg"], kept["exp_avg_sq"])
        cut = [_cut(tensor) for tensor in whole] if all(t.is_contiguous() for t in whole) else [[t] for t in whole]
        yield from ((*parts, kept["step"]) for parts in zip(*cut, strict=True))


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.view(-1).split(PIECE)


def _update(optimizer: Any, group: dict[str, Any], pieces: Sequence[Piece]) -> None:
    params, grads, averages, squares, counts = (list(column) for column in zip(*pieces, strict=True))
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        params,
        grads,
        averages,
        squares,
        [],
        counts,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=optimizer.grad_scale,
        found_inf=optimizer.found_inf,
    )
