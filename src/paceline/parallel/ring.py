"""Attention to a divided sequence whose keys and values are passed round the ranks, never held together.

In step i a rank has the keys and values of rank r - i, and sends them on while it computes. Of other ranks' chunks a
query sees all or nothing; with chunks r and 2n - 1 - r of 2n each step has two of four pairs.

| keys of | queries that see them | keys that are seen |
|---|---|---|
| this rank | all | all, causally |
| a lower rank | all | the first chunk |
| a higher rank | the second chunk | all |

Parts are joined by the logarithms of their sums, in fp32. The backward pass sends keys and values round again, and with
them their gradients, which come home complete.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.nn.attention import HALF

if TYPE_CHECKING:
    from paceline.parallel.context import ContextGroup

ATEN: Any = torch.ops.aten
FLASH_WIDTHS = range(8, 257, 8)  # of heads, on a CUDA device


def suits_ring(q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor) -> bool:
    """Return whether a kernel of the device returns the logarithms of its sums: on CUDA devices those for 16 bits."""
    width = q_BSHd.shape[-1]
    if width != v_BSKd.shape[-1]:
        return False
    return not q_BSHd.is_cuda or (_compute_type(q_BSHd) in HALF and width in FLASH_WIDTHS)


def attend_in_ring(
    q_BSHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, context: "ContextGroup", scale: float | None = None
) -> Tensor:
    """Compute causal attention of this rank's queries to the tokens of all ranks."""
    kind = _compute_type(q_BSHd)
    found: Tensor = _Ring.apply(q_BSHd.to(kind), k_BSKd.to(kind), v_BSKd.to(kind), context, scale)
    return found


def _compute_type(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: "ContextGroup", scale: float | None) -> Tensor:
        kv, message = torch.stack((k, v)), None
        out, lse = q.new_zeros(q.shape, dtype=_wide(q)), torch.empty(0)
        for step in range(context.ranks):
            message = _Message(kv, context) if step + 1 < context.ranks else None
            rows, seen, causal = _find_block(step, context, q.shape[1] // 2)
            part, part_lse, ctx.seed = _attend(q[:, rows], kv[:, :, seen], causal, scale)
            if step == 0:
                out, lse = part.to(out.dtype), part_lse
            else:
                joined = torch.logaddexp(lse[:, rows], part_lse)
                kept, new = ((each - joined).exp()[..., None] for each in (lse[:, rows], part_lse))
                out[:, rows] = out[:, rows] * kept + part * new
                lse[:, rows] = joined
            kv = kv if message is None else message.wait()
        out = out.to(q.dtype)
        ctx.context, ctx.scale = context, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), context, (q, k, v, out, lse) = incoming, ctx.context, ctx.saved_tensors
        kv, grad_q = torch.stack((k, v)), q.new_zeros(q.shape, dtype=_wide(q))
        grad_kv, on_its_way = kv.new_zeros(kv.shape, dtype=_wide(q)), None
        for step in range(context.ranks):
            message = _Message(kv, context) if step + 1 < context.ranks else None
            rows, seen, causal = _find_block(step, context, q.shape[1] // 2)
            sides = grad[:, rows].contiguous(), q[:, rows], out[:, rows], lse[:, rows]
            part_q, *part_kv = _attend_backward(*sides, kv[:, :, seen], causal, ctx.scale, ctx.seed)
            grad_q[:, rows] += part_q
            grad_kv = grad_kv if on_its_way is None else on_its_way.wait()
            grad_kv[:, :, seen] += torch.stack(part_kv)
            on_its_way = _Message(grad_kv, context)  # the gradients of these keys go where the keys go
            kv = kv if message is None else message.wait()
        assert on_its_way is not None
        grad_k, grad_v = on_its_way.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


class _Message:
    """A tensor on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, x: Tensor, context: "ContextGroup") -> None:
        self.sent, self.arriving, self.timer = x, torch.empty_like(x), context.timer
        after, before = (context.rank + 1) % context.ranks, (context.rank - 1) % context.ranks
        options: dict[str, Any] = {"group": context.messages}
        both = [dist.P2POp(dist.isend, x, group_peer=after, **options)]
        both += [dist.P2POp(dist.irecv, self.arriving, group_peer=before, **options)]
        self.works = dist.batch_isend_irecv(both)

    def wait(self) -> Tensor:
        with self.timer.blocking():
            for work in self.works:
                work.wait()
        return self.arriving


def _find_block(step: int, context: "ContextGroup", chunk: int) -> tuple[slice, slice, bool]:
    """Return (queries, keys, whether causal) of a step."""
    if step == 0:
        return slice(None), slice(None), True
    lower = (context.rank - step) % context.ranks < context.rank
    return (slice(None), slice(chunk), False) if lower else (slice(chunk, None), slice(None), False)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _share(x_BSKd: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for the heads that share them: not all kernels take fewer of them."""
    return x_BSKd if x_BSKd.shape[2] == heads else x_BSKd.repeat_interleave(heads // x_BSKd.shape[2], dim=2)


Seed = tuple[Tensor, ...]  # of dropout, of which there is none: a kernel wants it back


def _attend(q: Tensor, kv: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Seed]:
    """Return attention (B, S, H, d), the logarithms of the sums of its exponentials (B, S, H), and a seed."""
    k, v = (_share(x, q.shape[2]) for x in kv)
    if q.is_cuda:
        sizes = q.shape[1], k.shape[1]
        out, lse, *seed = ATEN._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, causal, False, scale=scale)
        return out, lse.transpose(1, 2).contiguous(), tuple(seed[:2])
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2).contiguous(), ()


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse_BSH: Tensor,
    kv: Tensor,
    causal: bool,
    scale: float | None,
    seed: Seed,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values: `out` and `lse_BSH` are those of the whole sequence."""
    shared, heads = kv.shape[3], q.shape[2]
    k, v = (_share(x, heads) for x in kv)
    lse = lse_BSH.transpose(1, 2).contiguous()
    if q.is_cuda:
        given = (grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *seed)
        grad_q, grad_k, grad_v = ATEN._flash_attention_backward(*given, scale=scale)
    else:
        heads_first = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*heads_first, lse, 0.0, causal, scale=scale)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in found)
    if shared < heads:
        grad_k, grad_v = (x.unflatten(2, (shared, -1)).sum(3, dtype=_wide(x)) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v
