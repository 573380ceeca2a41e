"""An exponential moving average of the weights, which is evaluated and used in their place (`train.ema`).

A rank averages what it updates, so the average is divided among ranks as the optimiser's state is. Buffers, such as
running statistics, and frozen weights are not averaged: they are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.parallel.parameters import LocalParameters

FIRST = 10
"""After t steps the decay is at most (1 + t) / (FIRST + t): the random weights of the beginning are soon forgotten."""


class WeightAverage:
    """As one rank holds it."""

    def __init__(self, decay: float, local: LocalParameters, parts: Sequence[nn.Module]) -> None:
        self.decay, self.local, self.parts = decay, local, parts
        self.kept = [part.data.detach().clone() for part in local]
        self.share = torch.zeros((), device=self.kept[0].device)
        """Of the new weights in the next average. A tensor: a recorded step reads it."""

    def before(self, step: int) -> None:
        """`step` steps are done, and one follows."""
        self.share.fill_(1 - min(self.decay, (1 + step) / (FIRST + step)))

    @torch.no_grad()
    def add(self, applied: Tensor) -> None:
        """Take in the weights after an update, unless it was not applied; nothing waits for the device."""
        share = self.share * applied.to(self.share)
        change = torch._foreach_sub([part.data for part in self.local], self.kept)
        torch._foreach_mul_(change, share.to(self.kept[0].dtype))
        torch._foreach_add_(self.kept, change)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model computes with the average; afterwards it has its own weights again, to the last bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part, kept in zip(self.local, self.kept, strict=True):
            own = part.data.clone()
            part.data.copy_(kept)
            kept.copy_(own)
        self.local.after_update()
        for module in (module for part in self.parts for module in part.modules()):
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()  # what is still gathered is of the weights before

    def tensors(self) -> dict[str, Tensor]:
        """By every name that a weight has: two where it is used in two places."""
        by_weight = {id(part.param): part.whole(kept) for part, kept in zip(self.local, self.kept, strict=True)}
        return {
            name: by_weight[id(p)]
            for part in self.parts
            for name, p in part.named_parameters(remove_duplicate=False)
            if id(p) in by_weight
        }
