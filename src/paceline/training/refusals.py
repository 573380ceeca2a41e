"""Keys of a training that contradict its workload or each other, refused before anything is built."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.parallel.compress import LOCAL
from paceline.spec import Train
from paceline.workload import Workload

OWN_INSTEAD = {
    "optimizer": ("optimizer", "eps", "nesterov"),
    "schedule": ("schedule", "warmup", "warmup_steps", "warmup_from", "warmup_shape", "final_lr"),
}
"""Methods of a workload, and the keys of `train` whose place they take."""


def refuse_contradictions(workload: Workload, evaluates: bool) -> None:
    train, parallel = workload.spec.train, workload.spec.parallel
    if train.patience and not evaluates:
        raise UserError(
            f"train.patience={train.patience} waits for a better evaluation, but data('test') gives no samples to "
            "evaluate on; hold some out, or use train.patience=0"
        )
    for method, keys in OWN_INSTEAD.items():
        for key in keys if workload.has(method) else ():
            if (value := getattr(train, key)) != getattr(Train(), key):
                raise UserError(
                    f"train.{key}={value} has no effect: {type(workload).__name__} has a method {method} of its own; "
                    "leave out one of the two"
                )
    if train.ema and parallel.reduce in LOCAL:
        raise UserError(
            f"train.ema={train.ema}: with parallel.reduce={parallel.reduce} each rank trains a model of its own, and "
            "there is no common one to average; use parallel.reduce=exact, or leave train.ema out"
        )
