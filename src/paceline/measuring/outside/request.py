"""What the processes of a measured command are told, through one variable of their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "PACELINE_OUTSIDE"
ON_PATH = Path(__file__).with_name("on_path")
"""Holds the file that Python runs when it starts, and nothing else."""


@dataclass(frozen=True)
class Request:
    folder: str
    """For events/rankN.jsonl."""
    steps: int
    """After so many the process ends."""
    ranks: int
    steps_by: str = ""
    """The optimiser whose steps count, where there are several."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Request | None:
        text = environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def environ(self, given: Mapping[str, str]) -> dict[str, str]:
        """An environment in which every Python process notes its steps."""
        path = os.pathsep.join(filter(None, (str(ON_PATH), given.get("PYTHONPATH"))))
        return {**given, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(self))}
