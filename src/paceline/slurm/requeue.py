"""Decide at the end of a batch job whether to requeue it.

The decision is recorded in the run's `jobs.jsonl`, printed in the job's log, and is the exit code: 0 finished or taken
away, 75 requeue, 76 start the ranks again in this job, 1 too many attempts without progress.
"""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from paceline.errors import UserError
from paceline.io.terminal import warn
from paceline.planner.emit import HERE_CODE, REQUEUE_CODE
from paceline.runlog.jobs import ATTEMPTS, NextAttempt, decide_next_attempt, detect_scheduler_job, record_job_event
from paceline.runlog.run_dir import RunDir

EXIT_CODES = {NextAttempt.DONE: 0, NextAttempt.LEFT: 0, NextAttempt.AGAIN: REQUEUE_CODE, NextAttempt.ENOUGH: 1}
EXIT_CODES[NextAttempt.HERE] = HERE_CODE


def decide_requeue() -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.slurm.requeue", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--asked", default="", metavar="USR1|TERM|LIMIT", help="signal that ended the job")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, metavar="N", help="most without progress")
    parser.add_argument("--here", action="store_true", help="the job can start its ranks again")
    arguments = parser.parse_args()
    try:
        run = RunDir.open(arguments.run)
    except UserError:
        warn(f"paceline: {arguments.run} was never started, so there is nothing to resume; see the log above")
        return 1
    job = detect_scheduler_job(os.environ)
    outcome = decide_next_attempt(run, arguments.asked, arguments.attempts, job.get("job", ""), arguments.here)
    record_job_event(run, "ended", **job, step=outcome.step, next=outcome.next, why=outcome.why)
    with suppress(OSError):  # the job's log may be on a full disk
        warn(f"paceline: {outcome.why}")
    return EXIT_CODES[outcome.next]


if __name__ == "__main__":
    os._exit(decide_requeue())  # Python's own exit gives another code where the log cannot be written
