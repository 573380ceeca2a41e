"""The work of one rank, whatever its kind: its run, this rank's place in it, where its record goes, and its size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.config import RunSpec, Train
from paceline.data.order import Order
from paceline.launch.environment import RankInfo
from paceline.launch.signals import StopRequest
from paceline.layout import Layout
from paceline.runlog.events import EventWriter, RunStatus
from paceline.runlog.progress import PauseSchedule
from paceline.trainer.checkpoint.reader import Checkpoint
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.trainer.resume_guard import describe_answer
from paceline.workload import BaseWorkload


@dataclass
class RunContext:
    """On one rank."""

    spec: RunSpec
    layout: Layout
    rank_info: RankInfo
    device: torch.device
    folder: Path
    """The run's: an engine keeps its configuration there, a fit its result."""
    events: EventWriter
    checkpoints: CheckpointWriter
    stop: StopRequest
    checkpoint: Checkpoint | None = None
    """Where a run goes on that was begun before."""
    beat: Callable[..., None] = lambda phase, step, busy_s=None: None
    """Leaves in the run folder what this rank is at (launch/heartbeat.py)."""
    shown: Callable[[dict[str, Any]], None] = lambda event: None
    """Told of every event, on the main rank: the progress bar, the loggers."""

    def event(self, kind: str, **values: Any) -> None:
        self.events.write(kind, **values)
        if self.rank_info.rank == 0:
            self.shown({"kind": kind, **values})


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job once it is built."""

    order: Order
    steps: int
    """The last step there can be."""
    parameters: int | None
    """Of the whole model; None where it has none that are counted."""
    layout: str
    """How the work is spread over ranks, as an equation."""
    equations: list[str]
    """The derived numbers, each as the equation that gives it."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the "start" event says of this job alone."""
    pauses: PauseSchedule | None = None
    """What is done between steps, where that is known beforehand."""


@dataclass
class Job(ABC):
    context: RunContext
    workload: BaseWorkload
    facts: JobFacts
    evaluation: dict[str, Any] = field(default_factory=dict, init=False)
    """The newest metrics."""

    @cached_property
    def answer(self) -> dict[str, Any]:
        """What determines it, for checkpoints to keep."""
        return describe_answer(self.workload)

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @property
    @abstractmethod
    def end(self) -> str:
        """For people: how a job that is done came to its end."""

    @property
    def why(self) -> str:
        """For people: why it is done before its last step; empty where it is not."""
        return ""

    def change_of_length(self, old: Train) -> str:
        """For people: what is different now that the run is longer than the section `old` says."""
        return ""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None: ...

    @abstractmethod
    def run(self) -> RunStatus:
        """From the present step until it is done, or asked to stop."""

    def conclude(self) -> None:  # noqa: B027
        """Write what people read beside the last checkpoint; on the main rank, and safe to do again."""
