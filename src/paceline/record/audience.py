"""Everyone who is told of the main rank's events: the person at the terminal, and the loggers of the run file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.record.loggers import open_loggers
from paceline.record.progress import Progress
from paceline.record.run_dir import RunDir
from paceline.spec import RunSpec


@contextmanager
def audience(
    spec: RunSpec, run: RunDir, total_samples: int, done_samples: int, show: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function to call with each event, until the run ends."""
    loggers = open_loggers(spec.train.loggers, run, spec)
    progress = Progress(total_samples, done_samples)
    ended = "failed"

    def tell(event: dict[str, Any]) -> None:
        nonlocal ended
        kind, step = event["kind"], event.get("step", 0)
        if kind == "end":
            ended = event["status"]
        if show and kind == "step":
            progress.step(event)
        elif show and kind == "evaluate":
            progress.evaluated(event)
        if kind == "evaluate" or (kind == "step" and step % spec.train.log_every == 0):
            prefix = "evaluate/" if kind == "evaluate" else "train/"
            values = {f"{prefix}{name}": value for name, value in event.items() if name not in ("kind", "step")}
            for logger in loggers:
                logger.log(step, values)

    with progress:
        try:
            yield tell
        finally:
            for logger in loggers:
                logger.close(ended)
