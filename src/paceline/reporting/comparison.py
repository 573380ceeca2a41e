"""Whether several runs trained the same thing: runs of one spec must have one loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parity import TOLERANCE
from paceline.reporting.run_view import RunView, loss_differences

COMPARED = ("train.global_batch", "train.lr", "train.seed", "train.optimizer", "train.precision")
COMPARED_SECTIONS = ("model.", "data.")
AS_EQUAL = 100
"""Times the tolerance of `paceline check`: these runs may be as long as they like."""


@dataclass(frozen=True)
class Comparison:
    runs: int
    steps: int
    """Of the shortest run."""
    differing: tuple[str, ...]
    """Keys of the specs that ask for another training; the losses say nothing then."""
    largest: float
    """Relative difference of the losses to those of the first run."""
    run: str
    step: int
    """Where that is."""
    tolerance: float

    @property
    def comparable(self) -> bool:
        return not self.differing

    @property
    def text(self) -> str:
        if self.differing:
            return f"The runs differ in {', '.join(self.differing[:4])}, so their losses are not expected to be equal."
        same = f"All {self.runs} runs trained the same thing"
        if not self.largest:
            return f"{same}: the losses are equal to the last digit over {self.steps} steps."
        told = f"the losses differ by {self.largest:.1e} at most (relative, {self.run} at step {self.step})"
        head = same if self.largest <= self.tolerance else "The runs did not train the same thing"
        return f"{head}: {told}, over {self.steps} steps."


def compared(runs: Sequence[RunView]) -> Comparison | None:
    """The largest difference of the losses says whether they are the same; None for one run."""
    if len(runs) < 2:
        return None
    first, *others = runs
    values = [
        {k: v for k, v, *_ in run.spec.fields() if k in COMPARED or k.startswith(COMPARED_SECTIONS)} for run in runs
    ]
    differing = tuple(key for key in values[0] if any(v.get(key) != values[0][key] for v in values[1:]))
    largest, name, step = 0.0, "", 0
    for run in () if differing else others:
        for at, difference in loss_differences(first, run):
            if difference > largest:
                largest, name, step = difference, run.name, at
    tolerance = AS_EQUAL * TOLERANCE[first.spec.train.precision]
    return Comparison(len(runs), min(len(run.points) for run in runs), differing, largest, name, step, tolerance)
