"""The commands `jobs`, `logs` and `cancel`: the Slurm jobs of runs."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.io.files import print_json, read_json
from paceline.io.format import clock
from paceline.io.terminal import print_text
from paceline.reports.watch import EventFollower
from paceline.runlog.events import read_events
from paceline.runlog.jobs import (
    NextAttempt,
    find_newest_step,
    find_runs_with_jobs,
    is_job_id,
    list_job_ids,
    record_job_event,
    sum_device_seconds,
)
from paceline.runlog.run_dir import RunDir
from paceline.slurm import commands
from paceline.slurm.jobs import find_log_files, find_run, list_run_folders

SHOWN_JOBS = 20


@dataclass(frozen=True)
class JobRow:
    """One run and its newest job."""

    run: str
    job: str
    jobs: int
    """That the run has had."""
    state: str
    why: str
    step: int
    steps: int | None
    left_s: float | None
    device_hours: float
    cost_usd: float | None


def collect_job_rows(folders: Iterable[str | Path] = ()) -> list[JobRow]:
    """Of every run in these folders (`runs`, and where the default site puts them), newest first."""
    places = [Path(folder) for folder in folders] or list_run_folders()
    runs = list(dict.fromkeys(run for folder in places for run in find_runs_with_jobs(folder)))
    newest = {run: list_job_ids(run)[-1] for run in runs}
    states = commands.fetch_job_states(newest.values())
    return [_build_job_row(run, job, states.get(job)) for run, job in newest.items()]


def _build_job_row(run: RunDir, job: str, state: commands.JobState | None) -> JobRow:
    main = EventFollower(run.events_file(0))
    main.look()
    records = list(read_events(run.jobs_file))
    ended: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "ended"), {})
    price = next((r.get("usd_per_device_hour") for r in reversed(records) if r["kind"] == "submit"), None)
    word, why = _describe_state(state, ended, main)
    step, step_s = _read_progress(run, main)
    steps = _count_steps(run)
    hours = sum_device_seconds(run) / 3600
    return JobRow(
        run=str(run.path),
        job=job,
        jobs=len(list_job_ids(run)),
        state=word,
        why=why,
        step=step,
        steps=steps,
        left_s=(steps - step) * step_s if steps and step_s and not main.end and state and state.active else None,
        device_hours=hours,
        cost_usd=hours * price if isinstance(price, int | float) else None,
    )


def _read_progress(run: RunDir, main: EventFollower) -> tuple[int, float]:
    """(the last step, how long one takes); of events that make no sense, what the checkpoints say."""
    try:
        return int(main.steps[-1]["step"]) if main.steps else find_newest_step(run), main.mean("step_s")
    except (KeyError, TypeError, ValueError):
        return find_newest_step(run), 0.0


def _describe_state(state: commands.JobState | None, ended: dict[str, Any], main: EventFollower) -> tuple[str, str]:
    """Slurm's word while a job waits or runs; afterwards what the folder says."""
    if state is not None and state.active:
        waits = state.state == "PENDING"
        return state.state.lower(), state.reason if waits else state.hosts
    if main.end.get("status") == "finished":
        return "finished", ""
    if ended.get("next") == NextAttempt.ENOUGH:
        return "gave up", str(ended.get("why", ""))
    if state is not None:
        return state.state.lower(), str(main.end.get("why", ""))
    return str(main.end.get("status", "unknown")), str(main.end.get("why", ""))


def _count_steps(run: RunDir) -> int | None:
    """Of the whole run: what the spec says, or the plan."""
    try:
        if steps := run.recorded_spec().train.steps:
            return steps
        planned = read_json(run.path / "plan.json").get("run", {}).get("steps")
    except (PacelineError, AttributeError):
        return None
    return planned if isinstance(planned, int) else None


def add_jobs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs (runs, and the site's)")
    parser.add_argument("--json", action="store_true", help="print every value as JSON")


def run_jobs(arguments: argparse.Namespace, console: Any) -> int:
    for folder in arguments.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of runs")
    rows = collect_job_rows(arguments.folders)
    if arguments.json:
        print_json([asdict(row) for row in rows])
        return 0
    if not rows:
        places = ", ".join(map(str, arguments.folders or list_run_folders()))
        print_text(f"no run in {places} was submitted; send one with  paceline submit RUN.yaml")
        return 0
    console.print(_build_jobs_table(rows[:SHOWN_JOBS]))
    if len(rows) > SHOWN_JOBS:
        print_text(f"and {len(rows) - SHOWN_JOBS} older ones; all of them with  --json")
    return 0


def _build_jobs_table(rows: list[JobRow]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1), show_edge=False)
    for name in ("run", "job", "state", "step", "left", "device-hours", "cost"):
        table.add_column(name, justify="right" if name in ("step", "left", "device-hours", "cost") else "left")
    for row in rows:
        of = f" of {row.steps:,}" if row.steps else ""
        nth = f" ({row.jobs} jobs)" if row.jobs > 1 else ""
        table.add_row(
            row.run,
            f"{row.job}{nth}",
            f"{row.state}{f': {row.why}' if row.why else ''}",
            f"{row.step:,}{of}",
            "" if row.left_s is None else clock(row.left_s),
            f"{row.device_hours:.2f}",
            "" if row.cost_usd is None else f"{row.cost_usd:.2f} USD",
        )
    return table


READ_EVERY_S = 0.5
ASK_EVERY_S = 5.0
"""Slurm is asked less often than the file is read."""
MAX_LOG_BYTES = 1 << 20
"""Of a long log, only the end is shown."""


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_FOLDER|JOB")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-f", "--follow", action="store_true", help="go on until the last job has ended")
    how.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_logs(arguments: argparse.Namespace, console: Any) -> int:
    found = find_run(arguments.run)
    jobs = [arguments.run] if is_job_id(arguments.run) else list_job_ids(found)
    if not jobs:
        raise UserError(f"{found.path} was not submitted; send it with  paceline submit RUN.yaml")
    files = find_log_files(found, jobs)
    places: dict[str, int] = {}
    if arguments.json:
        print_json([{"job": job, "log": files[job], "text": _read_new_text(job, files[job], places)} for job in jobs])
        return 0
    for job in jobs:
        _print_log(job, files[job], places, titled=len(jobs) > 1)
    if not any(places.values()) and not arguments.follow:
        state = commands.fetch_job_states(jobs).get(jobs[-1])
        print_text(f"job {jobs[-1]} has printed nothing yet" + (f": {state.state.lower()}" if state else ""))
    if arguments.follow:
        with suppress(KeyboardInterrupt):
            _follow_log(jobs[-1], files[jobs[-1]], places)
    return 0


def _follow_log(job: str, file: Path, places: dict[str, int]) -> None:
    """A queue that has answered once may be silent for a while: the job goes on meanwhile."""
    asked, answered = 0.0, False
    while True:
        if time.monotonic() - asked > ASK_EVERY_S:
            asked = time.monotonic()
            try:
                state = commands.fetch_job_states([job], sure=True).get(job)
                answered = True
            except PacelineError:
                if not answered:
                    raise
            else:
                if state is None or not state.active:
                    _print_log(job, file, places)
                    return
        _print_log(job, file, places)
        time.sleep(READ_EVERY_S)


def _print_log(job: str, file: Path, places: dict[str, int], titled: bool = False) -> None:
    text = _read_new_text(job, file, places)
    if titled and text:
        print_text(f"── job {job}")
    print_text(text.replace("\r", "\n"), end="")  # bars that were drawn over themselves


def _read_new_text(job: str, file: Path, places: dict[str, int]) -> str:
    """What was written to a log since it was last looked at; `places` remembers up to where."""
    if not file.is_file():  # a pipe would be waited for
        return ""
    try:
        with open(file, "rb") as stream:
            length = stream.seek(0, 2)
            stream.seek(places.get(job, max(0, length - MAX_LOG_BYTES)))
            text = stream.read()
            places[job] = stream.tell()
    except OSError:
        return ""
    return text.decode(errors="replace")


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER|JOB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_cancel(arguments: argparse.Namespace, console: Any) -> int:
    commands.require_slurm()
    found = [find_active_jobs(given) for given in arguments.runs]  # none is cancelled where one cannot be
    for run, jobs in found:
        cancel_run(run, jobs)
        if not arguments.json:
            later = f"paceline submit {shlex.quote(str(run.path))}"
            print_text(f"cancelled job{'s' * (len(jobs) > 1)} {', '.join(jobs)}; go on later with  {later}")
    if arguments.json:
        print_json([{"run": run.path, "jobs": jobs} for run, jobs in found])
    return 0


def find_active_jobs(given: str) -> tuple[RunDir, list[str]]:
    """A run, and which of its jobs, or of those that were asked for, wait or run."""
    found = find_run(given)
    asked = [given] if is_job_id(given) else list_job_ids(found)
    active = [job for job, state in commands.fetch_job_states(asked, sure=True).items() if state.active]
    if not active:
        raise UserError(
            f"{found.path} has no job that waits or runs; its jobs: {', '.join(list_job_ids(found)) or 'none'}"
        )
    return found, active


def cancel_run(run: RunDir, jobs: Sequence[str]) -> None:
    """The folder is told first: whoever looks there must not start the run again."""
    for job in jobs:
        record_job_event(run, "cancel", job=job)
    commands.cancel_jobs(jobs)
