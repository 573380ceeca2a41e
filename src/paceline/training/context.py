"""What every job has of its run, whatever it does: the request, this rank's place in it, and where its record goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.launch.environment import Place
from paceline.launch.signals import StopRequest
from paceline.record.events import EventWriter
from paceline.spec import RunSpec
from paceline.training.checkpoints.writer import CheckpointWriter


@dataclass
class RunContext:
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
