# mypy: ignore-errors
"""Triton kernels of batch norm over groups of consecutive samples, channels innermost: all groups in one launch.

Sums do not depend on how many groups a pass has: a group is cut into chunks by its own size alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, CHUNKS = 64, 64
"""Rows of a tile; the most chunks of a group."""


@triton.jit
def _locate(group, groups, per_group, rows):
    """Return the first row of a group and the row behind it: the last group has what is left."""
    begin = group * per_group
    return begin, tl.where(group == groups - 1, rows, begin + per_group)


@triton.jit
def _sum_chunks(
    x, dy, moments, parts, rows, per_group, chunk, chunks, channels,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Forward: sums of x and its square, less the first row. Backward: sums of dy and of dy times the normalised x."""
    part, group = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < channels
    begin, end = _locate(group, tl.num_programs(2), per_group, rows)
    first, last = begin + part * chunk, tl.minimum(begin + part * chunk + chunk, end)
    if BACKWARD:
        shift = tl.load(moments + group * 3 * channels + column, mask=inside, other=0.0)
        scale = tl.load(moments + (group * 3 + 2) * channels + column, mask=inside, other=0.0)
    else:
        at = tl.minimum(first, rows - 1).to(tl.int64)
        shift = tl.load(x + at * channels + column, mask=inside, other=0.0).to(tl.float32)
    one = tl.zeros([ROWS, WIDTH], tl.float32)
    two = tl.zeros([ROWS, WIDTH], tl.float32)
    for row in range(first, last, ROWS):
        here = row + tl.arange(0, ROWS)
        known = (here < last)[:, None] & inside[None, :]
        place = here.to(tl.int64)[:, None] * channels + column[None, :]
        moved = tl.load(x + place, mask=known, other=0.0).to(tl.float32) - shift[None, :]
        if BACKWARD:
            gradient = tl.load(dy + place, mask=known, other=0.0).to(tl.float32)
            one += gradient
            two += gradient * moved
        else:
            moved = tl.where(known, moved, 0.0)
            one += moved
            two += moved * moved
    to = parts + ((group * chunks + part) * 2) * channels + column
    sum_one, sum_two = tl.sum(one, 0), tl.sum(two, 0)
    if BACKWARD:
        sum_two *= scale
    else:
        count = tl.maximum(last - first, 1).to(tl.float32)
        mean = sum_one / count
        sum_two = tl.maximum(sum_two - sum_one * mean, 0.0)
        sum_one = tl.where(last > first, mean + shift, 0.0)
    tl.store(to, sum_one, mask=inside)
    tl.store(to + channels, sum_two, mask=inside)


@triton.jit
def _join_chunks(
    parts, found, rows, per_group, chunk, chunks, channels, eps,
    BACKWARD: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Forward: mean, unbiased variance and 1 / deviation of each group. Backward: the two sums."""
    group = tl.program_id(1)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    part = tl.arange(0, CHUNKS)
    inside = column < channels
    known = (part < chunks)[:, None] & inside[None, :]
    at = parts + ((group * chunks + part[:, None]) * 2) * channels + column[None, :]
    one = tl.load(at, mask=known, other=0.0)
    two = tl.load(at + channels, mask=known, other=0.0)
    if BACKWARD:
        to = found + group * 2 * channels + column
        tl.store(to, tl.sum(one, 0), mask=inside)
        tl.store(to + channels, tl.sum(two, 0), mask=inside)
    else:
        begin, end = _locate(group, tl.num_programs(1), per_group, rows)
        count = tl.minimum(tl.maximum(end - begin - part * chunk, 0), chunk).to(tl.float32)[:, None]
        total = (end - begin).to(tl.float32)
        mean = tl.sum(one * count, 0) / total
        away = one - mean[None, :]
        squares = tl.sum(two + tl.where(known, away * away * count, 0.0), 0)
        to = found + group * 3 * channels + column
        tl.store(to, mean, mask=inside)
        tl.store(to + channels, squares / tl.maximum(total - 1.0, 1.0), mask=inside)
        tl.store(to + 2 * channels, 1.0 / tl.sqrt(squares / total + eps), mask=inside)


@triton.jit
def _apply(
    x, dy, moments, sums, weight, bias, out, rows, per_group, channels,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Forward: normalise x. Backward: the gradient of x."""
    group = tl.program_id(2)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < channels
    begin, end = _locate(group, tl.num_programs(2), per_group, rows)
    here = begin + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = (here < end)[:, None] & inside[None, :]
    place = here.to(tl.int64)[:, None] * channels + column[None, :]
    mean = tl.load(moments + group * 3 * channels + column, mask=inside, other=0.0)
    scale = tl.load(moments + (group * 3 + 2) * channels + column, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normal = (tl.load(x + place, mask=known, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    if BACKWARD:
        total = (end - begin).to(tl.float32)
        at = sums + group * 2 * channels + column
        mean_one = tl.load(at, mask=inside, other=0.0) / total
        mean_two = tl.load(at + channels, mask=inside, other=0.0) / total
        gradient = tl.load(dy + place, mask=known, other=0.0).to(tl.float32)
        result = (gradient - mean_one[None, :] - normal * mean_two[None, :]) * (factor * scale)[None, :]
    else:
        result = normal * factor[None, :] + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=known)


class GroupNormalise(torch.autograd.Function):
    """Normalise groups of `sizes` rows; `moments` gets mean, variance and 1 / deviation."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, moments: Tensor, sizes: list[int], eps: float) -> Tensor:
        y = launch_kernels(x, x, moments, moments, (weight, bias), sizes, eps)
        ctx.save_for_backward(x, weight, moments)
        ctx.sizes = sizes
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, moments = ctx.saved_tensors
        sums = moments.new_empty(len(moments), 2, x.shape[1])
        dx = launch_kernels(x, dy.contiguous(), moments, sums, (weight, weight), ctx.sizes)
        of_bias, of_weight = sums.sum(0).to(weight.dtype)
        return dx, of_weight, of_bias, None, None, None


def launch_kernels(x: Tensor, dy: Tensor, moments: Tensor, found: Tensor, affine: tuple, sizes: list[int], eps=0.0):
    """Return the normalised rows, or, where `found` is for sums instead of `moments`, the gradient of the rows."""
    (rows, channels), groups, per_group, longest = x.shape, len(sizes), sizes[0], max(sizes[0], sizes[-1])
    width, back = min(64, triton.next_power_of_2(channels)), found is not moments
    chunk, across = triton.cdiv(triton.cdiv(per_group, CHUNKS), ROWS) * ROWS, triton.cdiv(channels, width)
    chunks = triton.cdiv(longest, chunk)
    parts, out = moments.new_empty(groups, chunks, 2, channels), torch.empty_like(x)
    divided, most = (rows, per_group, chunk, chunks, channels), triton.next_power_of_2(chunks)
    with torch.cuda.device_of(x):
        _sum_chunks[chunks, across, groups](x, dy, moments, parts, *divided, back, ROWS, width)
        _join_chunks[across, groups](parts, found, *divided, eps, back, most, width)
        _apply[triton.cdiv(longest, ROWS), across, groups](
            x, dy, moments, found, *affine, out, rows, per_group, channels, back, ROWS, width
        )
    return out
