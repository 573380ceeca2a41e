"""Scheduler jobs of a run, recorded as lines of `jobs.jsonl` in its folder.

    submit   job script log nodes per_node gpus usd_per_device_hour
    cancel   job
    ended    job step next why

The file is append-only. Which job trained is in the events: each "start" names its job.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.runlog.events import EventWriter, RunStatus, read_events
from paceline.runlog.run_dir import RunDir, find_runs

ATTEMPTS = 3  # without progress, after which a run is given up

ENDED_BY = {"USR1": "the time limit is near", "LIMIT": "the time limit came before the ranks had stopped"}


class NextAttempt(StrEnum):
    """What follows an attempt."""

    DONE = "done"
    AGAIN = "again"
    HERE = "here"
    ENOUGH = "enough"
    LEFT = "left"  # the machines were taken away; whoever did so decides


@dataclass(frozen=True)
class AttemptOutcome:
    next: NextAttempt
    why: str
    step: int


def detect_scheduler_job(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the Slurm job of this process (`12_3` in an array), or nothing outside of one."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return {"job": job, "restarts": int(restarts) if restarts.isdecimal() else 0} if job else {}


def record_job_event(run: RunDir, kind: str, **values: Any) -> None:
    with EventWriter(run.jobs_file) as events:
        events.write(kind, **values)


def decide_next_attempt(
    run: RunDir, asked: str, attempts: int = ATTEMPTS, job: str = "", here: bool = False
) -> AttemptOutcome:
    """Decide from the run folder whether a run is tried again, whatever the exit code of its ranks was.

    `asked` is what ended the attempt: USR1 (the time limit is near), LIMIT (it was reached), TERM, or "". `here`: ranks
    of an attempt that came further are started again in the job, which is not requeued.
    """
    step = find_newest_step(run)
    ended: dict[str, Any] = {}
    for event in read_events(run.events_file(0)):
        if event["kind"] in ("start", "end"):  # the last attempt has no end if it was killed
            ended = event
    if ended.get("status") == RunStatus.FINISHED:
        return AttemptOutcome(NextAttempt.DONE, "the run is finished", step)
    records = list(read_events(run.jobs_file))
    if any(record["kind"] == "cancel" and record.get("job") == job for record in records):
        return AttemptOutcome(NextAttempt.LEFT, "the job was cancelled", step)
    if asked == "TERM":
        return AttemptOutcome(NextAttempt.LEFT, f"the machines were taken away at step {step:,}", step)
    wasted = _count_wasted_attempts(records, step)
    if wasted >= attempts:
        reason = ended.get("why")
        why = f": {reason}" if reason else f"; what they printed:  paceline logs {shlex.quote(str(run.path))}"
        why = f"{wasted} attempts in a row came no further than step {step:,}{why}"
        return AttemptOutcome(NextAttempt.ENOUGH, why, step)
    because = ENDED_BY.get(asked, "the attempt ended before the run did")
    again = NextAttempt.HERE if here and not asked and not wasted else NextAttempt.AGAIN
    return AttemptOutcome(again, f"{because}; the next one resumes from step {step:,}", step)


def find_newest_step(run: RunDir) -> int:
    """Return the step of the newest sealed checkpoint, or 0."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in run.checkpoints.glob("step-*"))
    return max((int(name[1]) for name in names if name), default=0)


def _count_wasted_attempts(records: Iterable[Mapping[str, Any]], step: int) -> int:
    """Count attempts in a row, this one included, that saved no newer checkpoint."""
    best, wasted = 0, 0
    for record in records:
        if record["kind"] == "submit":
            wasted = 0
        elif record["kind"] == "ended" and record.get("next") != NextAttempt.LEFT:
            reached = record.get("step") or 0
            wasted = wasted + 1 if reached <= best else 0
            best = max(best, reached)
    return wasted + 1 if step <= best else 0


def list_job_ids(run: RunDir) -> list[str]:
    """Return the ids of all jobs of a run, submitted or recorded by its ranks, oldest first."""
    submitted = (event.get("job") for event in read_events(run.jobs_file))
    ran = (event.get("job") for event in read_events(run.events_file(0), "start"))
    return list(dict.fromkeys(job for job in (*submitted, *ran) if isinstance(job, str) and is_job_id(job)))


def is_job_id(text: str) -> bool:
    """Return whether it is `1234` or, in an array, `1234_5`."""
    return re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", text) is not None


def find_runs_with_jobs(folder: Path) -> Iterator[RunDir]:
    """Return the runs in a folder that have scheduler jobs, newest first."""
    return (run for run in find_runs(folder) if list_job_ids(run))
