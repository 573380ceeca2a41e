# mypy: ignore-errors
"""Triton kernels: losses with gradients in the memory of the logits, and masks of keyed dropout."""

import torch
import triton
import triton.language as tl

LOSS_BLOCK = 4096
DROPOUT_BLOCK = 2048


@triton.jit
def _compute_row_loss(logits, targets, losses, stride, vocab, width, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    # each lane has its own running maximum and sum: the first block is full, so none stays at minus infinity
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    chosen = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        here = begin + columns
        x = tl.load(at + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
        chosen += tl.where(here == target, x, 0.0)
    top = tl.max(highest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    counts = target >= 0
    tl.store(losses + row, tl.where(counts, log_sum - tl.sum(chosen, 0), 0.0))
    if GRADIENTS:
        for begin in range(0, width, BLOCK):
            here = begin + columns
            x = tl.load(at + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
            gradient = tl.where(counts, tl.exp(x - log_sum) - (here == target).to(tl.float32), 0.0)
            tl.store(at + here, gradient.to(logits.dtype.element_ty), mask=here < width)


def compute_losses_in_place(
    logits_CW: torch.Tensor, targets_C: torch.Tensor, vocab: int, gradients: bool
) -> torch.Tensor:
    """Return the loss of each row (fp32); the logits become their gradients, 0 from `vocab` on."""
    assert logits_CW.stride(1) == 1, "rows of logits must be in one piece"
    losses_C = torch.empty(len(logits_CW), dtype=torch.float32, device=logits_CW.device)
    block = min(LOSS_BLOCK, 1 << (vocab.bit_length() - 1))
    sizes = (logits_CW.stride(0), vocab, logits_CW.shape[1])
    _compute_row_loss[(len(logits_CW),)](logits_CW, targets_C, losses_C, *sizes, gradients, block, num_warps=8)
    return losses_C


@triton.jit
def _hash32(x):
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -0x7A143595
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _compare_noise(start, kept, columns, threshold, BLOCK: tl.constexpr):
    row = tl.program_id(0)  # the side of a grid that may be long
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = _hash32(tl.load(start + row) ^ _hash32(column))
    tl.store(kept + row.to(tl.int64) * columns + column, noise >= threshold, mask=column < columns)


def launch_compare_noise(start: torch.Tensor, columns: int, threshold: int) -> torch.Tensor:
    kept = torch.empty(len(start), columns, dtype=torch.bool, device=start.device)
    block = min(DROPOUT_BLOCK, triton.next_power_of_2(columns))
    grid, warps = (len(start), triton.cdiv(columns, block)), max(1, min(4, block // 256))
    with torch.cuda.device(start.device):
        _compare_noise[grid](start, kept, columns, threshold, BLOCK=block, num_warps=warps)
    return kept
