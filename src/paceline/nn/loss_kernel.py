# mypy: ignore-errors
"""Losses and gradients from a chunk of logits in one Triton kernel, in the memory of the logits."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _row(logits, targets, losses, stride, vocab, width, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
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
    """The loss of each row (fp32). The logits become their own gradients; columns from `vocab` on become 0."""
    assert logits_CW.stride(1) == 1, "rows of logits must be in one piece"
    losses_C = torch.empty(len(logits_CW), dtype=torch.float32, device=logits_CW.device)
    block = min(BLOCK, 1 << (vocab.bit_length() - 1))
    sizes = (logits_CW.stride(0), vocab, logits_CW.shape[1])
    _row[(len(logits_CW),)](logits_CW, targets_C, losses_C, *sizes, gradients, block, num_warps=8)
    return losses_C
