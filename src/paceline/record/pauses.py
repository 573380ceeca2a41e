"""What a training does between its steps: how often it evaluates and saves, and about how long that takes.

The plan, the live line and the time that is left count with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec import Train

FORWARD_SHARE = 1 / 3
"""Time of a sample that is evaluated over that of one that is trained on: there is no backward pass."""
COPY_BYTES_S = 4e9
"""At which each rank copies its part of a checkpoint aside, while training waits."""
WRITE_BYTES_S = 1e9
"""At which the copy then goes to the disk, with its checksums, while training goes on; the run waits for the last."""


@dataclass(frozen=True)
class Pauses:
    """Of a whole run."""

    steps: int
    evaluate_every: int
    """Steps; the last step is followed by an evaluation and a checkpoint too."""
    checkpoint_every: int
    evaluated: int = 0
    """Samples of each evaluation; 0 where there is none."""

    @classmethod
    def of(cls, train: Train, steps: int, steps_per_epoch: int, evaluated: int) -> Pauses:
        return cls(steps, train.evaluate_every or steps_per_epoch, train.checkpoint_every or steps_per_epoch, evaluated)

    def evaluations(self, done: int = 0) -> int:
        """How many are to come after so many steps."""
        return _due(done, self.steps, self.evaluate_every) if self.evaluated else 0

    def checkpoints(self, done: int = 0) -> int:
        """The same, without those that are made because an evaluation was the best so far."""
        return _due(done, self.steps, self.checkpoint_every)

    def evaluate_s(self, sample_s: float) -> float:
        """Of one evaluation, where a sample of the training takes that long over all ranks."""
        return self.evaluated * sample_s * FORWARD_SHARE

    def checkpoints_s(self, bytes_per_rank: float) -> float:
        """Of all checkpoints, of which each rank writes so much."""
        return self.checkpoints() * bytes_per_rank / COPY_BYTES_S + bytes_per_rank / WRITE_BYTES_S


def _due(done: int, steps: int, every: int) -> int:
    if done >= steps:
        return 0
    return steps // every - done // every + (steps % every > 0)
