"""Verbs that need more than one part of Paceline: what `paceline.train` and `paceline.resume` call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.launch.environment import detect
from paceline.planning.plan import applied
from paceline.spec import RunSpec
from paceline.training import run
from paceline.training.run import RunResult, resumed_spec


def train(
    spec: RunSpec,
    out: str | Path = "runs",
    *,
    resume: str | Path | None = None,
    start: str | Path | None = None,
    show: bool = True,
) -> RunResult:
    """Train a spec into a new folder below `out`, or go on with the run in `resume`.

    `start` is a run, a file or a folder with the weights to begin with, as `model.start` of the spec.
    `parallel: auto` on a named cluster is the layout that the plan chooses.
    """
    if start is not None:
        spec = spec.replace({"model.start": str(start)})
    place = detect(os.environ)
    return run.train(applied(spec, place.world if place is not None else None), out, resume=resume, show=show)


def resume(run: str | Path, overrides: Any = (), *, show: bool = True) -> RunResult:
    """Go on with a run from its newest whole checkpoint, on the same or another number of ranks.

    `{"train.epochs": "+2"}` goes on beyond its first length.
    """
    return train(resumed_spec(run, overrides), resume=run, show=show)
