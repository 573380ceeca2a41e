"""The jobs of a run: what was asked of a scheduler and how each attempt ended, as lines of `jobs.jsonl` in its folder.

    submit   job script log nodes per_node gpus usd_per_device_hour
    cancel   job
    ended    job step next why

Lines are only ever added. Who trained is in the events: each "start" says which job it was in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.runlog.events import EventWriter, RunStatus, read_events
from paceline.runlog.run_dir import RunDir, find_runs

ATTEMPTS = 3
"""Without progress, after which a run is not tried again."""

ENDED_BY = {"USR1": "the time limit is near", "LIMIT": "the time limit came before the ranks had stopped"}


class NextAttempt(StrEnum):
    """What follows an attempt."""

    DONE = "done"
    AGAIN = "again"
    ENOUGH = "enough"
    """It failed too often without progress."""
    LEFT = "left"
    """Somebody took the machines away, and decides by himself."""


@dataclass(frozen=True)
class AttemptOutcome:
    """What the folder says after an attempt, and why."""

    next: NextAttempt
    why: str
    step: int


def detect_scheduler_job(environ: Mapping[str, str]) -> dict[str, Any]:
    """The job that this process runs in, for the record; empty outside of one. A task of an array is `12_3`."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return {"job": job, "restarts": int(restarts) if restarts.isdecimal() else 0} if job else {}


def record_job_event(run: RunDir, kind: str, **values: Any) -> None:
    with EventWriter(run.jobs_file) as events:
        events.write(kind, **values)


def decide_next_attempt(run: RunDir, asked: str, attempts: int = ATTEMPTS, job: str = "") -> AttemptOutcome:
    """Whether a run is to be tried again: its folder decides, whatever the exit code of its ranks was.

    `asked` is what ended the attempt: USR1 (the time limit is near), LIMIT (it was reached), TERM (somebody takes the
    machines), or nothing where it ended by itself.
    """
    step = find_newest_step(run)
    failed = _last_end(run)
    if failed is not None and failed.get("status") == RunStatus.FINISHED:
        return AttemptOutcome(NextAttempt.DONE, "the run is finished", step)
    records = list(read_events(run.jobs_file))
    if any(record["kind"] == "cancel" and record.get("job") == job for record in records):
        return AttemptOutcome(NextAttempt.LEFT, "the job was cancelled", step)
    if asked == "TERM":
        return AttemptOutcome(NextAttempt.LEFT, f"the machines were taken away at step {step:,}", step)
    vain = _attempts_in_vain(records, step)
    if vain >= attempts:
        said = failed.get("why") if failed is not None else None
        why = f": {said}" if said else f"; what they printed:  paceline logs {shlex.quote(str(run.path))}"
        return AttemptOutcome(
            NextAttempt.ENOUGH, f"{vain} attempts in a row came no further than step {step:,}{why}", step
        )
    because = ENDED_BY.get(asked, "the attempt ended before the run did")
    return AttemptOutcome(NextAttempt.AGAIN, f"{because}; the next one goes on from step {step:,}", step)


def find_newest_step(run: RunDir) -> int:
    """Of the sealed checkpoints; 0 where there is none."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in run.checkpoints.glob("step-*"))
    return max((int(name[1]) for name in names if name), default=0)


def _last_end(run: RunDir) -> dict[str, Any] | None:
    """The "end" of the last attempt; None while one goes on, or after a kill."""
    last = None
    for event in read_events(run.events_file(0)):
        last = event if event["kind"] == "end" else None if event["kind"] == "start" else last
    return last


def _attempts_in_vain(records: Iterable[Mapping[str, Any]], step: int) -> int:
    """Attempts in a row, this one included, that ended by themselves or at the limit without a newer checkpoint."""
    best, vain = 0, 0
    for record in records:
        if record["kind"] == "submit":
            vain = 0
        elif record["kind"] == "ended" and record.get("next") != NextAttempt.LEFT:
            reached = record.get("step")
            vain = vain + 1 if not isinstance(reached, int) or reached <= best else 0
            best = max(best, reached if isinstance(reached, int) else 0)
    return vain + 1 if step <= best else 0


def list_job_ids(run: RunDir) -> list[str]:
    """The ids of all jobs of a run, oldest first: those that were submitted, and those that ranks say they ran in."""
    submitted = (event.get("job") for event in read_events(run.jobs_file))
    ran = (event.get("job") for event in read_events(run.events_file(0), "start"))
    return list(dict.fromkeys(job for job in (*submitted, *ran) if isinstance(job, str) and is_job_id(job)))


def sum_device_seconds(run: RunDir) -> float:
    """Time of all attempts, each from its start to the last event before the next, times its ranks."""
    total, began, last, ranks = 0.0, 0.0, 0.0, 0
    for event in read_events(run.events_file(0)):
        now = event.get("t")
        if not isinstance(now, int | float):
            continue
        if event["kind"] == "start":
            total += (last - began) * ranks
            began, ranks = now, _count(event.get("ranks"))
        last = now
    return total + (last - began) * ranks


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def is_job_id(text: str) -> bool:
    """`1234` or, in an array, `1234_5`."""
    return re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", text) is not None


def find_runs_with_jobs(folder: Path) -> Iterator[RunDir]:
    """The runs in a folder that a scheduler was asked to train, newest first."""
    return (run for run in find_runs(folder) if list_job_ids(run))
