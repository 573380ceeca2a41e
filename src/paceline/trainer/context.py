"""The work of one rank: its run and layout, its rank and device, where its events go, and its job."""

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
    """What is resolved once at the start of a rank."""

    spec: RunSpec
    layout: Layout
    rank_info: RankInfo
    device: torch.device
    folder: Path
    events: EventWriter
    checkpoints: CheckpointWriter
    stop: StopRequest
    checkpoint: Checkpoint | None = None
    beat: Callable[..., None] = lambda phase, step, busy_s=None: None
    """Writes the heartbeat of this rank (launch/heartbeat.py)."""
    show_event: Callable[[dict[str, Any]], None] = lambda event: None
    """Called with every event, on the main rank: the progress bar, the loggers."""

    def notice(self, text: str) -> None:
        self.event("notice", text=text)

    def event(self, kind: str, **values: Any) -> None:
        self.events.write(kind, **values)
        if self.rank_info.rank == 0:
            self.show_event({"kind": kind, **values})


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job once it is built."""

    order: Order
    steps: int
    parameters: int | None  # of the whole model; None if it has none that are counted
    layout: str  # how the work is spread over ranks, as an equation
    equations: list[str]  # the derived numbers, each as the equation that gives it
    notes: Mapping[str, Any] = field(default_factory=dict)
    pauses: PauseSchedule | None = None


@dataclass
class Job(ABC):
    context: RunContext
    workload: BaseWorkload
    facts: JobFacts
    evaluation: dict[str, Any] = field(default_factory=dict, init=False)

    @cached_property
    def answer(self) -> dict[str, Any]:
        return describe_answer(self.workload)

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @property
    @abstractmethod
    def end(self) -> str:
        """Return how a finished job came to its end, for people."""

    @property
    def stop_reason(self) -> str:
        """Return why the job is done before its last step; "" if it is not."""
        return ""

    def describe_length_change(self, old: Train) -> str:
        """Describe what differs now that the run is longer than the section `old` says."""
        return "what was done stays as it is"

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None: ...

    @abstractmethod
    def run(self) -> RunStatus:
        """Run from the present step until the job is done, or asked to stop."""

    def conclude(self) -> None:  # noqa: B027
        """Write what people read beside the last checkpoint; on the main rank, and safe to repeat."""
