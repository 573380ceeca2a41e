"""The learning rate as a function of the samples seen, and how it grows with the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import RunFailed
from paceline.spec import Train
from paceline.workload import Workload


@dataclass(frozen=True)
class Schedule:
    """The learning rate at a number of samples seen: never of calls, so restarts and accumulation cannot bend it."""

    peak: float
    shape: str
    warmup: float
    final: float
    total: int

    def __call__(self, seen: int) -> float:
        warm = self.warmup * self.total
        if seen < warm:
            return self.peak * seen / warm
        done = min(1.0, (seen - warm) / max(1.0, self.total - warm))
        match self.shape:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (self.final + (1 - self.final) * (1 - done))
            case _:
                return self.peak * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


def scaled_lr(train: Train) -> tuple[float, str]:
    """The peak learning rate for this batch, and the equation that gives it."""
    ratio, said = train.global_batch / train.base_batch, f"{train.global_batch} / {train.base_batch}"
    ways = {"none": (1.0, ""), "linear": (ratio, f" × {said}"), "sqrt": (math.sqrt(ratio), f" × √({said})")}
    factor, how = ways[train.lr_scaling]
    return train.lr * factor, f"{train.lr * factor:g} peak lr = {train.lr:g}{how}"


def schedule_of(train: Train, total_samples: int, workload: Workload | None = None) -> Callable[[int], float]:
    """That of the run file, or the workload's own."""
    peak = scaled_lr(train)[0]
    if workload is None or not workload.has("schedule"):
        return Schedule(peak, train.schedule, train.warmup, train.final_lr, total_samples)
    factor_at = workload.schedule

    def own(seen: int) -> float:
        factor: object = factor_at(seen, total_samples)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise RunFailed(
                f"workload: schedule({seen}, {total_samples}) returned {factor!r}; it must return a factor of the "
                "learning rate, 0 or more"
            )
        return peak * factor

    return own
