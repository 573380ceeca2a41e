"""The learning rate as a function of the samples seen, and how it grows with the batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import Train
from paceline.errors import RunFailed
from paceline.workload import Workload

if TYPE_CHECKING:
    from paceline.data.order import Order

Rate = Callable[[int], float]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of samples seen, never of calls."""

    train: Train
    peak: float
    total: int

    def __call__(self, seen: int) -> float:
        warm, final = count_warmup_samples(self.train, self.total), self.train.final_lr
        if seen < warm:
            return self._compute_warmup_lr(seen, warm)
        done = min(1.0, (seen - warm) / max(1.0, self.total - warm))
        match self.train.schedule:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (final + (1 - final) * (1 - done))
            case _:
                return self.peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))

    def _compute_warmup_lr(self, seen: int, warm: float) -> float:
        begin = self.train.warmup_from
        if self.train.warmup_shape == "log":
            step, steps = seen / self.train.global_batch, max(2.0, warm / self.train.global_batch)
            grown = min(1.0, math.log(1 + step) / math.log(steps))
        else:
            grown = seen / warm
        return self.peak * (begin + (1 - begin) * grown)


def count_warmup_samples(train: Train, total: int) -> float:
    if train.warmup_steps is None:
        return train.warmup * total
    return float(train.count_samples(train.warmup_steps))


def describe_schedule_change(planned: Rate, now: Rate, order: "Order", first: int) -> str:
    """Describe what differs for a run that continues at step `first` under another schedule."""
    was, becomes = planned(order.seen(first - 1)), now(order.seen(first))
    return (
        f"the learning rate is that of the longer schedule, {becomes:.3g} at step {first + 1} after {was:.3g} at step "
        f"{first}; a run of this length from the start may have had other rates before"
    )


def scale_lr(train: Train) -> tuple[float, str]:
    """Return the peak learning rate for this batch, and the equation that gives it."""
    ratio, text = train.global_batch / train.base_batch, f"{train.global_batch} / {train.base_batch}"
    rules = {"none": (1.0, ""), "linear": (ratio, f" × {text}"), "sqrt": (math.sqrt(ratio), f" × √({text})")}
    factor, how = rules[train.lr_scaling]
    return train.lr * factor, f"{train.lr * factor:g} peak lr = {train.lr:g}{how}"


def build_schedule(train: Train, total_samples: int, workload: Workload | None = None) -> Rate:
    """Return the schedule of the run file, or the workload's own."""
    peak = scale_lr(train)[0]
    if workload is None or not workload.has("schedule"):
        return Schedule(train, peak, total_samples)
    factor_at = workload.schedule

    def own(seen: int) -> float:
        factor: object = factor_at(seen, total_samples)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            reason = f"workload: schedule({seen}, {total_samples}) returned {factor!r}; it must return 0 or more"
            raise RunFailed(reason, code="invalid-workload", key="schedule")
        return peak * factor

    return own
