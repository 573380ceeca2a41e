"""Context parallelism: ranks divide each sequence, and attention gathers the keys and values of all of its tokens.

A sequence of 2n chunks goes to n ranks, chunks r and 2n - 1 - r to rank r, so that each computes as much of the causal
half. Keys and values are gathered once in each layer, in their own order; the backward pass sums their gradients and
leaves each rank its part. Or they are passed round (`ring.py`), where no mask is needed. All else works on single
tokens, and gradients are summed as those of other samples are.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.launch.shared_device import route_through_host
from paceline.nn.attention import causal_attention
from paceline.parallel.ddp import ALL_GATHER
from paceline.parallel.ring import attend_in_ring, suits_ring
from paceline.runlog.timers import CollectiveTimer

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ContextGroup:
    """The ranks that divide a sequence, as one of them sees it."""

    def __init__(self, mesh: DeviceMesh, timer: CollectiveTimer, ring: bool = False) -> None:
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.messages, self.ring = route_through_host(self.group, torch.device(mesh.device_type)), ring
        self.chunks = self.rank, 2 * self.ranks - 1 - self.rank
        self.timer = timer

    def positions(self, tokens: int, device: torch.device | None) -> Tensor:
        """Return the places, in the whole sequence, of the tokens that this rank has."""
        return torch.cat([torch.arange(tokens // 2, device=device) + chunk * (tokens // 2) for chunk in self.chunks])

    def part(self, x_BS: Tensor) -> Tensor:
        """Return this rank's part of whole sequences; an axis of other tensors may follow."""
        chunk, left = divmod(x_BS.shape[1], 2 * self.ranks)
        assert not left, f"{x_BS.shape[1]} tokens in {2 * self.ranks} chunks"
        return torch.cat([x_BS.narrow(1, index * chunk, chunk) for index in self.chunks], 1)

    def mask(
        self, tokens: int, texts_BS: Tensor | None = None, window: int = 0, device: torch.device | None = None
    ) -> Tensor:
        """Return (B, 1, tokens of this rank, all tokens), True where a query may look: at earlier tokens of its text,
        and of its window."""
        device = device if texts_BS is None else texts_BS.device
        own, every = self.positions(tokens, device)[:, None], torch.arange(tokens * self.ranks, device=device)
        seen = every <= own
        if window:
            seen &= own - every < window
        if texts_BS is None:
            return seen[None, None]
        return (seen & (self.part(texts_BS)[:, :, None] == texts_BS[:, None]))[:, None]

    def attend(
        self,
        q_BSHd: Tensor,
        k_BSKd: Tensor,
        v_BSKd: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute causal attention of this rank's queries to all tokens.

        The mask (B, 1, S of this rank, whole S), if there is one, is True where a query may look.
        """
        if self.ring and mask is None and not dropout and suits_ring(q_BSHd, k_BSKd, v_BSKd):
            return attend_in_ring(q_BSHd, k_BSKd, v_BSKd, self, scale)
        keys, values = self.gather(torch.cat([k_BSKd, v_BSKd], -1)).split([k_BSKd.shape[-1], v_BSKd.shape[-1]], -1)
        chunk, parts = q_BSHd.shape[1] // 2, []
        for place, index in enumerate(self.chunks):
            rows, seen = slice(place * chunk, (place + 1) * chunk), (index + 1) * chunk
            own = None if mask is None else mask[..., rows, :seen]
            parts.append(causal_attention(q_BSHd[:, rows], keys[:, :seen], values[:, :seen], own, scale, dropout))
        return torch.cat(parts, 1)

    def gather(self, x_BS: Tensor) -> Tensor:
        """Return whole sequences (B, S, …) in the order of their tokens, from the parts of all ranks."""
        every = _Gather.apply(x_BS, self.group, self.timer).unflatten(2, (2, -1))  # rank, B, its two chunks, tokens, …
        ordered = torch.cat([every[:, :, 0], every[:, :, 1].flip(0)])
        return ordered.transpose(0, 1).flatten(1, 2)

    def sum(self, sums: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return sums over the tokens of all ranks."""
        found = {name: torch.as_tensor(value, device=device).clone() for name, value in sums.items()}
        for value in found.values():
            dist.all_reduce(value, group=self.group)
        return found


class _Gather(torch.autograd.Function):
    """(…) of each rank -> (ranks, …); backward sums over the ranks and keeps the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, timer: CollectiveTimer) -> Tensor:
        ctx.group, ctx.timer = group, timer
        ranks = dist.get_world_size(group)
        every = x.new_empty(ranks * x.shape[0], *x.shape[1:])  # gloo takes no axis of ranks
        with timer.blocking():
            ALL_GATHER(every, x.contiguous(), group=group)
        return every.unflatten(0, (ranks, -1))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = incoming
        own = gradient.new_empty(gradient.shape[1:])
        with ctx.timer.blocking():
            REDUCE_SCATTER(own, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return own, None, None
