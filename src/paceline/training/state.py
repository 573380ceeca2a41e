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
from paceline.parallel.wrapping import ParallelModel
from paceline.spec import Train
from paceline.training.optim import optimizer_of, set_lr


@dataclass
class State:
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    step: int = 0

    @classmethod
    def new(cls, model: ParallelModel, train: Train, device: torch.device) -> State:
        """That of a run which begins."""
        state = cls(model, optimizer_of(train, model.local_parameters), Scaler(train.precision, device))
        state.allocate()
        return state

    def tensors(self) -> dict[str, Any]:
        """Everything to be saved, by name; loading writes into these very tensors."""
        model = {name: value for part in self.model.parts for name, value in part.state_dict().items()}
        optim = {
            f"{local.name}.{key}": local.whole(value)
            for local in self.model.local_parameters
            for key, value in self.optimizer.state[local.data].items()
            if isinstance(value, Tensor)
        }
        kept = self.model.reduction.tensors()
        return {
            "model": model,
            "optim": optim,
            "scaler": self.scaler.state(),
            **({self.model.reduction.entry: kept} if kept else {}),
        }

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Take over what `read` puts into tensors of these names and shapes."""
        read(self.tensors())

    def average_over_ranks(self) -> None:
        """Before a checkpoint: what ranks still hold apart becomes the same on all of them, and stays so."""
        self.model.reduction.average_models(self.step, now=True)
        self.model.reduction.average_state(self._optimizer_tensors())

    def buffers(self) -> Iterator[Tensor]:
        """Running statistics and the like."""
        for part in self.model.parts:
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
        for value in self._optimizer_tensors():
            value.zero_()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for values in self.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))
