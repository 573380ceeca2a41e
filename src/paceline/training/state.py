"""All that resuming needs and nothing else: weights, optimiser, loss scale and the position in steps.

The position alone fixes the learning rate, the samples that follow and every random stream, since each is a function
of it; none of them is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.precision import Scaler
from paceline.parallel.wrapping import Spread
from paceline.training.optim import set_lr


@dataclass
class State:
    spread: Spread
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    step: int = 0

    def tensors(self) -> dict[str, Any]:
        """Everything to be saved, by name; loading writes into these very tensors."""
        model = {name: value for part in self.spread.parts for name, value in part.state_dict().items()}
        optim = {
            f"{piece.name}.{key}": piece.whole(value)
            for piece in self.spread.pieces
            for key, value in self.optimizer.state[piece.data].items()
            if isinstance(value, Tensor)
        }
        kept = self.spread.saving.tensors()
        return {
            "model": model,
            "optim": optim,
            "scaler": self.scaler.state(),
            **({self.spread.saving.entry: kept} if kept else {}),
        }

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Take over what `read` puts into tensors of these names and shapes."""
        read(self.tensors())

    def settle(self) -> None:
        """Before a checkpoint: what ranks still hold apart becomes the same on all of them, and stays so."""
        saving = self.spread.saving
        saving.join(self.step, now=True)
        saving.settle(v for values in self.optimizer.state.values() for v in values.values() if isinstance(v, Tensor))

    def buffers(self) -> Iterator[Tensor]:
        """Running statistics and the like."""
        for part in self.spread.parts:
            yield from part.buffers()

    def allocate(self) -> None:
        """Give the optimiser all of its state, at zero, before there was a gradient.

        A checkpoint then holds the same tensors at any step, and a step that is passed over leaves nothing undefined.
        """
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        set_lr(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for values in self.optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()
