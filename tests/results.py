"""What tests read of a run folder, and of a command."""

from dataclasses import dataclass
from pathlib import Path

from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir


@dataclass(frozen=True)
class Answer:
    code: object
    out: str
    err: str
    error: BaseException | None = None


def steps_of(run, rank=0):
    """Read the steps of a `RunResult` or of a run folder."""
    return read_steps(RunDir(Path(getattr(run, "path", run))).events_file(rank))


def losses(run):
    return [step["loss"] for step in steps_of(run)]
