"""The work of one rank, whatever its kind: what a run asks of it, and which kind a workload gets."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.record.events import Status
from paceline.training.checkpoints.saved import Checkpoint
from paceline.training.context import JobFacts, RunContext
from paceline.training.fitting import fit_job
from paceline.training.setup import gradient_job
from paceline.workload import BaseWorkload, PassWorkload, Workload


class Job(Protocol):
    context: RunContext
    facts: JobFacts
    evaluation: dict[str, Any]
    """The newest metrics."""

    @property
    def workload(self) -> BaseWorkload: ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    @property
    def end(self) -> str:
        """For people: how a job that is done came to its end."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None: ...

    def run(self) -> Status:
        """From the present step until it is done, or asked to stop."""
        ...

    def conclude(self) -> None:
        """Write what people read beside the last checkpoint; on the main rank, and safe to do again."""
        ...


def job_of(context: RunContext, workload: BaseWorkload) -> Job:
    """The one place where kinds of work part ways."""
    match workload:
        case PassWorkload():
            return fit_job(context, workload)
        case Workload():
            return gradient_job(context, workload)
    raise TypeError(f"{type(workload).__name__} is neither a Workload nor a PassWorkload")
