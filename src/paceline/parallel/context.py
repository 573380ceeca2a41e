"""Context parallelism: ranks divide each sequence, and attention gathers the keys and values of all of its tokens.

A sequence of 2n chunks goes to n ranks, chunks r and 2n - 1 - r to rank r, so that each computes as much of the causal
half. Keys and values are gathered once in each layer, in their own order; the backward pass sums their gradients and
leaves each rank its part. Heads are gathered in groups: attention of one is computed while the next is on its way. Or
keys and values are passed round (`ring.py`), where no mask is needed. All else works on single tokens, and gradients
are summed as those of other samples are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.launch.shared_device import route_through_host
from paceline.layout import count_head_groups
from paceline.nn.attention import causal_attention
from paceline.parallel.ddp import ALL_GATHER
from paceline.parallel.exchange import Exchange, Started, arrive, depart
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
        groups, parts = count_head_groups(k_BSKd.shape[2]), []
        both = [torch.cat(pair, -1) for pair in zip(k_BSKd.chunk(groups, 2), v_BSKd.chunk(groups, 2), strict=True)]
        sizes = [k_BSKd.shape[-1], v_BSKd.shape[-1]]
        for queries, gathered in zip(q_BSHd.chunk(groups, 2), self.gather(both), strict=True):
            keys, values = gathered.split(sizes, -1)
            parts.append(self._attend_to_whole(queries, keys, values, mask, scale, dropout))
        return torch.cat(parts, 2)

    def _attend_to_whole(
        self, q_BSHd: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        chunk, parts = q_BSHd.shape[1] // 2, []
        for place, index in enumerate(self.chunks):
            rows, seen = slice(place * chunk, (place + 1) * chunk), (index + 1) * chunk
            own = None if mask is None else mask[..., rows, :seen]
            parts.append(causal_attention(q_BSHd[:, rows], keys[:, :seen], values[:, :seen], own, scale, dropout))
        return torch.cat(parts, 1)

    def gather(self, tensors_BS: Sequence[Tensor]) -> Iterator[Tensor]:
        """Start to gather tensors; yield each as whole sequences (B, S, …), in the order of their tokens."""
        exchanges = [Exchange(self._gather, self._sum_scatter, self.timer) for _ in tensors_BS]
        for exchange, sent in zip(exchanges, depart(exchanges, tensors_BS), strict=True):
            chunks = arrive(exchange, sent).unflatten(0, (self.ranks, -1)).unflatten(2, (2, -1))
            ordered = torch.cat([chunks[:, :, 0], chunks[:, :, 1].flip(0)])  # (chunk, B, its tokens, …)
            yield ordered.transpose(0, 1).flatten(1, 2)

    def _gather(self, x: Tensor) -> Started:
        every = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])  # gloo takes no axis of ranks
        return every, ALL_GATHER(every, x, group=self.group, async_op=True)

    def _sum_scatter(self, gradient: Tensor) -> Started:
        own = gradient.new_empty(gradient.shape[0] // self.ranks, *gradient.shape[1:])
        return own, REDUCE_SCATTER(own, gradient, group=self.group, async_op=True)

    def sum(self, sums: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return sums over the tokens of all ranks."""
        found = {name: torch.as_tensor(value, device=device).clone() for name, value in sums.items()}
        for value in found.values():
            dist.all_reduce(value, group=self.group)
        return found
