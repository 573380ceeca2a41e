"""The verb `cancel`: end the jobs of a run. The run saves first, and can go on later."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError
from paceline.record.files import print_json
from paceline.record.jobs import is_job, jobs_of, note
from paceline.record.run_dir import RunDir
from paceline.submitting import slurm
from paceline.submitting.finding import run_of
from paceline.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER|JOB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace, console: Any) -> int:
    slurm.require_slurm()
    found = [active_jobs(given) for given in arguments.runs]  # none is cancelled where one cannot be
    for run, jobs in found:
        cancel(run, jobs)
        if not arguments.json:
            later = f"paceline submit {shlex.quote(str(run.path))}"
            say(f"cancelled job{'s' * (len(jobs) > 1)} {', '.join(jobs)}; go on later with  {later}")
    if arguments.json:
        print_json([{"run": run.path, "jobs": jobs} for run, jobs in found])
    return 0


def active_jobs(given: str) -> tuple[RunDir, list[str]]:
    """A run, and which of its jobs, or of those that were asked for, wait or run."""
    found = run_of(given)
    asked = [given] if is_job(given) else jobs_of(found)
    active = [job for job, state in slurm.states(asked, sure=True).items() if state.active]
    if not active:
        raise UserError(f"{found.path} has no job that waits or runs; its jobs: {', '.join(jobs_of(found)) or 'none'}")
    return found, active


def cancel(run: RunDir, jobs: Sequence[str]) -> None:
    """The folder is told first: whoever looks there must not start the run again."""
    for job in jobs:
        note(run, "cancel", job=job)
    slurm.cancel_jobs(jobs)
