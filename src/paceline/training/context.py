"""What every job has, whatever it does: its run, this rank's place in it, where its record goes, and its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.data.order import Order
from paceline.launch.environment import Place
from paceline.launch.signals import StopRequest
from paceline.record.events import EventWriter
from paceline.spec import RunSpec
from paceline.training.checkpoints.writer import CheckpointWriter


@dataclass
class RunContext:
    """On one rank."""

    spec: RunSpec
    place: Place
    device: torch.device
    folder: Path
    """The run's: an engine keeps its configuration there, a fit its result."""
    events: EventWriter
    checkpoints: CheckpointWriter
    stop: StopRequest
    shown: Callable[[dict[str, Any]], None] = lambda event: None
    """Told of every event, on the main rank: the progress bar, the loggers."""

    def event(self, kind: str, **values: Any) -> None:
        self.events.write(kind, **values)
        if self.place.rank == 0:
            self.shown({"kind": kind, **values})


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job once it is built."""

    order: Order
    steps: int
    """The last step there can be."""
    parameters: int
    """Of the whole model."""
    layout: str
    """How the work is spread over ranks, as an equation."""
    equations: list[str]
    """The derived numbers, each as the equation that gives it."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the "start" event says of this job alone."""
