"""All that resuming needs and nothing else: weights, optimiser, loss scale and the position in steps.

The position alone fixes the learning rate, the samples that follow and every random stream, since each is a function
of it; none of them is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.training.optim import set_lr
from paceline.training.precision import Scaler


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    step: int = 0

    def tensors(self) -> dict[str, Any]:
        """Everything to be saved, by name; loading writes into these very tensors."""
        named = dict(self.model.named_parameters())
        optim = {
            f"{name}.{key}": value
            for name, p in named.items()
            for key, value in self.optimizer.state[p].items()
            if isinstance(value, Tensor)
        }
        return {"model": dict(self.model.state_dict()), "optim": optim, "scaler": self.scaler.state()}

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
