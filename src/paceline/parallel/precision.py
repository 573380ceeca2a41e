"""The type of the matrix products. Weights, gradients and optimiser stay in fp32 (fp64 for `fp64`).

`fp8` is bf16, but for the products of layers (paceline.parallel.fp8).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


class Scaler:
    """Keeps fp16 gradients away from underflow: the loss is multiplied by `scale`, the gradient divided by it.

    Gradients are summed over ranks before they are looked at, so one rank's overflow is every rank's: all skip the
    same step and halve the same scale. For other precisions the scale is 1 and stays.
    """

    def __init__(self, precision: str, device: torch.device, growth_interval: int = 1000) -> None:
        self.active = precision == "fp16"
        self.growth_interval = growth_interval
        self.scale = torch.tensor(2.0**14 if self.active else 1.0, device=device)
        self.good = torch.zeros((), device=device)

    def update(self, finite: Tensor) -> None:
        """After a step: halve where it overflowed, double after a long time without."""
        if not self.active:
            return
        good = torch.where(finite, self.good + 1, 0.0)
        grow = good >= self.growth_interval
        self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5))
        self.good.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good}
