"""The verb `logs`: what the jobs of a run have printed."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.record.files import print_json
from paceline.record.jobs import is_job, jobs_of
from paceline.submitting import slurm
from paceline.submitting.finding import log_files, run_of
from paceline.terminal import say

EVERY_S = 0.5
ASK_EVERY_S = 5.0
"""Slurm is asked less often than the file is read."""
MOST_BYTES = 1 << 20
"""Of a long log, only the end is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_FOLDER|JOB")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-f", "--follow", action="store_true", help="go on until the last job has ended")
    how.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace, console: Any) -> int:
    found = run_of(arguments.run)
    jobs = [arguments.run] if is_job(arguments.run) else jobs_of(found)
    if not jobs:
        raise UserError(f"{found.path} was not submitted; send it with  paceline submit RUN.yaml")
    files = log_files(found, jobs)
    places: dict[str, int] = {}
    if arguments.json:
        print_json([{"job": job, "log": files[job], "text": _added(job, files[job], places)} for job in jobs])
        return 0
    for job in jobs:
        _shown(job, files[job], places, titled=len(jobs) > 1)
    if not any(places.values()) and not arguments.follow:
        state = slurm.states(jobs).get(jobs[-1])
        say(f"job {jobs[-1]} has printed nothing yet" + (f": {state.state.lower()}" if state else ""))
    if arguments.follow:
        with suppress(KeyboardInterrupt):
            _follow(jobs[-1], files[jobs[-1]], places)
    return 0


def _follow(job: str, file: Path, places: dict[str, int]) -> None:
    """A queue that has answered once may be silent for a while: the job goes on meanwhile."""
    asked, answered = 0.0, False
    while True:
        if time.monotonic() - asked > ASK_EVERY_S:
            asked = time.monotonic()
            try:
                state = slurm.states([job], sure=True).get(job)
                answered = True
            except PacelineError:
                if not answered:
                    raise
            else:
                if state is None or not state.active:
                    _shown(job, file, places)
                    return
        _shown(job, file, places)
        time.sleep(EVERY_S)


def _shown(job: str, file: Path, places: dict[str, int], titled: bool = False) -> None:
    text = _added(job, file, places)
    if titled and text:
        say(f"── job {job}")
    say(text.replace("\r", "\n"), end="")  # bars that were drawn over themselves


def _added(job: str, file: Path, places: dict[str, int]) -> str:
    """What was written to a log since it was last looked at; `places` remembers up to where."""
    if not file.is_file():  # a pipe would be waited for
        return ""
    try:
        with open(file, "rb") as stream:
            length = stream.seek(0, 2)
            stream.seek(places.get(job, max(0, length - MOST_BYTES)))
            text = stream.read()
            places[job] = stream.tell()
    except OSError:
        return ""
    return text.decode(errors="replace")
