"""How much of the held-out split an evaluation during a run uses, and which samples these are.

Nothing of torch is needed here: `explain`, the plan and the time that is left ask for the number too.
"""

from __future__ import annotations

import numpy as np

from paceline.data.order import Order, permute, total_steps
from paceline.spec import Train

SMALL = 4
"""Chunks (`Workload.evaluation_chunk`) that are always evaluated."""
SHARE = 0.5
"""Samples evaluated for each one trained on since the last evaluation, at most. Without a backward pass a sample takes
about a third of the time, so that an evaluation takes about a sixth of the time of the training before it."""
SEED, EPOCH = 0, -1
"""Of the part that is drawn: the same for every seed of the training, so that runs can be compared."""


def evaluated(train: Train, order: Order, held_out: int, chunk: int) -> int:
    """How many of the held-out samples an evaluation uses, where those of a chunk are computed in one pass."""
    if train.evaluate_on == "all":
        return held_out
    if train.evaluate_on != "auto":
        return min(held_out, train.evaluate_on)
    steps = total_steps(train, order)
    between = order.seen(min(steps, train.evaluate_every or order.steps_per_epoch))
    return min(held_out, max(SMALL * chunk, round(SHARE * between)))


def evaluated_ids(held_out: int, count: int) -> np.ndarray:
    """Which ones, in their order: all, or a part that depends on nothing but the two numbers."""
    if count >= held_out:
        return np.arange(held_out)
    return np.sort(permute(np.arange(count), held_out, SEED, EPOCH))


def equation(train: Train, order: Order, held_out: int, chunk: int) -> str:
    """For people: the number, and where it comes from."""
    count = evaluated(train, order, held_out, chunk)
    if count == held_out:
        return f"evaluated on all {held_out:,} held-out samples"
    why = "" if train.evaluate_on != "auto" else "; all of them with train.evaluate_on=all"
    return f"evaluated on {count:,} of {held_out:,} held-out samples, the same ones each time{why}"
