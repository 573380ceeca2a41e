"""The loss of a language model in chunks: logits of a few tokens at a time, never of the whole batch.

The forward pass also computes the gradients, while the logits exist; the backward pass scales them. The vocabulary may
be spread over the ranks of a group, each with some rows of the weight.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.nn.experts import choose_product_type
from paceline.nn.keyed_dropout import has_triton

NOT_COUNTED = -100
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}  # enough for products to run at full speed
MIN_TOKENS, MAX_TOKENS = 128, 8192
ALIGNED = 64


def compute_chunked_losses(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    chunk_tokens: int = 0,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> Tensor:
    """Return the cross-entropy summed per sample: (B,), in fp32 or fp64. Targets below 0 do not count.

    The incoming gradient must be the same for every sample. With a group, x_BSD is the same on all its ranks, and
    weight_VD holds the rows of the vocabulary from `first` on (`split_vocabulary`); all ranks get the same losses.
    """
    chunk_tokens = chunk_tokens or _chunk_tokens(x_BSD.device.type, weight_VD.shape[0], targets_BS.numel())
    shard = _VocabularyShard(group, first)
    return _ChunkedLosses.apply(x_BSD, weight_VD, targets_BS, chunk_tokens, shard, torch.is_grad_enabled())


def split_vocabulary(vocab: int, parts: int, part: int) -> tuple[int, int]:
    """Return (first row, rows) of one part of a vocabulary, as `torch.chunk` divides it."""
    each = -(-vocab // parts)
    first = min(part * each, vocab)
    return first, min(each, vocab - first)


def _chunk_tokens(device: str, vocab: int, tokens: int) -> int:
    wanted = CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"]) // max(1, vocab)
    chunks = -(-tokens // min(MAX_TOKENS, max(MIN_TOKENS, wanted)))
    return -(-tokens // max(1, chunks))


class _VocabularyShard(NamedTuple):
    group: dist.ProcessGroup | None
    first: int

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.group is not None:
            dist.all_reduce(x, op, self.group)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        weight_VD: Tensor,
        targets_BS: Tensor,
        chunk_tokens: int,
        shard: _VocabularyShard,
        gradients: bool,
    ) -> Tensor:
        product_type = choose_product_type(x_BSD, weight_VD)
        sum_type = torch.promote_types(product_type, torch.float32)
        # Gradients come unscaled, which is too small for fp16.
        grad_type = torch.bfloat16 if product_type == torch.float16 else product_type
        device = x_BSD.device
        vocab = weight_VD.shape[0]
        # fp16 has no kernel, since its unscaled gradients need a wider type
        fused = shard.group is None and device.type == "cuda" and product_type == torch.bfloat16 and has_triton()
        if fused:
            from paceline.nn.triton_kernels import compute_losses_in_place
        with torch.autocast(device.type, enabled=False):
            x_ND, targets_N = x_BSD.reshape(-1, x_BSD.shape[-1]), targets_BS.reshape(-1)
            weight_product_VD = _pad_rows(weight_VD, product_type) if fused else weight_VD.to(product_type)
            losses_N = torch.empty(len(x_ND), dtype=sum_type, device=device)
            trains_weight = gradients and ctx.needs_input_grad[1]
            if gradients:
                weight_grad_VD = weight_product_VD if grad_type == product_type else weight_VD.to(grad_type)
                dx_ND = torch.empty(x_ND.shape, dtype=torch.promote_types(x_BSD.dtype, grad_type), device=device)
                if trains_weight:
                    dweight_VD = torch.zeros(weight_product_VD.shape, dtype=sum_type, device=device)
            for begin in range(0, len(x_ND), chunk_tokens):
                part = slice(begin, begin + chunk_tokens)
                x_CD = x_ND[part].to(product_type)
                if fused:
                    dlogits_CV = x_CD @ weight_product_VD.T
                    losses_N[part] = compute_losses_in_place(dlogits_CV, targets_N[part], vocab, gradients)
                else:
                    logits_CV = (x_CD @ weight_product_VD.T).to(sum_type)
                    losses_N[part], dlogits_CV = _softmax(logits_CV, targets_N[part], shard, gradients)
                if gradients:
                    dlogits_CV = dlogits_CV.to(grad_type)
                    dx_ND[part] = dlogits_CV @ weight_grad_VD
                    if trains_weight:
                        dweight_VD = _add_product(dweight_VD, dlogits_CV.T, x_CD.to(grad_type))
            if gradients:
                shard.all_reduce(dx_ND)
                ctx.save_for_backward(dx_ND.view(x_BSD.shape), dweight_VD[:vocab] if trains_weight else None)
                ctx.types = x_BSD.dtype, weight_VD.dtype
            return losses_N.view(targets_BS.shape).sum(1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (incoming_B,) = incoming
        if not _is_uniform(incoming_B):
            raise RuntimeError("chunked_losses: the gradient must be the same for every sample; sum the losses first")
        dx_BSD, dweight_VD = ctx.saved_tensors
        x_type, weight_type = ctx.types
        dx_BSD = (dx_BSD * incoming_B[:, None, None].to(dx_BSD.dtype)).to(x_type)
        if dweight_VD is not None:
            dweight_VD = (dweight_VD * incoming_B[0].to(dweight_VD.dtype)).to(weight_type)
        return dx_BSD, dweight_VD, None, None, None, None


def _is_uniform(values: Tensor) -> bool:
    """Return whether all are equal; only checked on the CPU, where that is cheap."""
    if torch.compiler.is_compiling() or type(values) is not Tensor or values.device.type != "cpu":
        return True
    return torch.equal(values.nan_to_num(), values[:1].nan_to_num().expand_as(values))


def _pad_rows(weight_VD: Tensor, kind: torch.dtype) -> Tensor:
    vocab, width = weight_VD.shape
    if vocab % ALIGNED == 0:
        return weight_VD.to(kind)
    out = torch.zeros(-(-vocab // ALIGNED) * ALIGNED, width, dtype=kind, device=weight_VD.device)
    out[:vocab] = weight_VD
    return out


def _softmax(logits_CV: Tensor, targets_C: Tensor, shard: _VocabularyShard, gradients: bool) -> tuple[Tensor, Tensor]:
    """Return (losses, their gradient in the memory of the logits)."""
    tokens, rows = logits_CV.shape
    counts_C = targets_C >= 0
    local_C = targets_C - shard.first
    here_C = counts_C & (local_C >= 0) & (local_C < rows)
    index_C1 = torch.where(here_C, local_C, 0)[:, None]
    if rows:
        highest_C = logits_CV.amax(1)
        target_C = torch.where(here_C, logits_CV.gather(1, index_C1)[:, 0], 0)
    else:
        highest_C = logits_CV.new_full((tokens,), -torch.inf)
        target_C = logits_CV.new_zeros(tokens)
    shard.all_reduce(highest_C, dist.ReduceOp.MAX)
    exp_CV = logits_CV.sub_(highest_C[:, None]).exp_()
    sums_2C = torch.stack([exp_CV.sum(1), target_C])
    shard.all_reduce(sums_2C)
    sum_C, target_C = sums_2C
    losses_C = torch.where(counts_C, sum_C.log() + highest_C - target_C, 0)
    if gradients and rows:
        exp_CV.mul_((counts_C / sum_C)[:, None])
        exp_CV.scatter_add_(1, index_C1, -here_C[:, None].to(exp_CV.dtype))
    return losses_C, exp_CV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, added in fp32; a core rounds products of bf16 first."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if total.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype)
    return total.add_(left @ right)
