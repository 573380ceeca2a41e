"""What a batch script asks when its ranks have ended: is there more to do?

The answer is written into the run's `jobs.jsonl`, said in the job's log, and given as exit code: 0 nothing is left to
do here, 75 try again, 1 enough.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from paceline.errors import UserError
from paceline.io.terminal import warn
from paceline.planner.emit_slurm import REQUEUE_CODE
from paceline.runlog.jobs import ATTEMPTS, NextAttempt, decide_next_attempt, detect_scheduler_job, record_job_event
from paceline.runlog.run_dir import RunDir

EXIT_CODES = {NextAttempt.DONE: 0, NextAttempt.LEFT: 0, NextAttempt.AGAIN: REQUEUE_CODE, NextAttempt.ENOUGH: 1}


def decide_requeue() -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.slurm.requeue", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--asked", default="", metavar="USR1|TERM|LIMIT", help="what came to the batch script")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, metavar="N", help="without progress, at most")
    arguments = parser.parse_args()
    try:
        run = RunDir.open(arguments.run)
    except UserError:
        warn(f"paceline: {arguments.run} was not begun, so there is nothing to go on with; see above")
        return 1
    job = detect_scheduler_job(os.environ)
    found = decide_next_attempt(run, arguments.asked, arguments.attempts, job.get("job", ""))
    record_job_event(run, "ended", **job, step=found.step, next=found.next, why=found.why)
    warn(f"paceline: {found.why}")
    return EXIT_CODES[found.next]


if __name__ == "__main__":
    sys.exit(decide_requeue())
