"""The Slurm jobs of runs: find a run by its job, report the state of each run, cancel its jobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.io.files import read_json
from paceline.reports.watch import EventFollower
from paceline.runlog.events import read_events, sum_wall_seconds
from paceline.runlog.jobs import (
    NextAttempt,
    find_newest_step,
    find_runs_with_jobs,
    is_job_id,
    list_job_ids,
    record_job_event,
)
from paceline.runlog.run_dir import RunDir
from paceline.slurm import commands
from paceline.slurm.site_file import read_site

RUNS_FOLDER = Path("runs")


def list_run_folders() -> list[Path]:
    """Return the folders that hold runs: `runs`, and that of the default site."""
    site_runs = read_site().runs
    return list(dict.fromkeys([RUNS_FOLDER, *([site_runs] if site_runs is not None else [])]))


def find_run(given: str | Path) -> RunDir:
    path, job = Path(given), str(given)
    if not is_job_id(job) or path.exists():
        return RunDir.open(path)
    folders = list_run_folders()
    for run in (run for folder in folders for run in find_runs_with_jobs(folder)):
        if job in list_job_ids(run):
            return run
    message = f"job {job}: no run in {' or '.join(map(str, folders))} has it; give the run folder instead"
    raise UserError(message, code="not-found")


def find_log_files(run: RunDir, jobs: Sequence[str]) -> dict[str, Path]:
    """Return the log file of each job. A job that was submitted by hand logs beside the others."""
    beside, found = run.path, dict[str, Path]()
    for event in read_events(run.jobs_file, "submit"):
        log, job = event.get("log"), event.get("job")
        if isinstance(log, str) and Path(log).name == f"slurm-{job}.out":
            found[str(job)], beside = Path(log), Path(log).parent
    return {job: found.get(job) or beside / f"slurm-{job}.out" for job in jobs}


@dataclass(frozen=True)
class JobRow:
    run: str
    job: str
    jobs: int
    state: str
    why: str
    step: int
    steps: int | None
    left_s: float | None
    device_hours: float
    cost_usd: float | None


def collect_job_rows(folders: Iterable[str | Path] = ()) -> list[JobRow]:
    """Return a row for every submitted run in these folders, newest first; without folders, in the usual ones."""
    searched = [Path(folder) for folder in folders] or list_run_folders()
    runs = list(dict.fromkeys(run for folder in searched for run in find_runs_with_jobs(folder)))
    newest = {run: list_job_ids(run)[-1] for run in runs}
    states = commands.fetch_job_states(newest.values())
    return [_build_job_row(run, job, states.get(job)) for run, job in newest.items()]


def _build_job_row(run: RunDir, job: str, state: commands.JobState | None) -> JobRow:
    main = EventFollower(run.events_file(0))
    main.look()
    records = list(read_events(run.jobs_file))
    ended: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "ended"), {})
    price = next((r.get("usd_per_device_hour") for r in reversed(records) if r["kind"] == "submit"), None)
    state_name, reason = _describe_state(state, ended, main)
    step, step_s = _read_progress(run, main)
    steps = _count_steps(run)
    hours = sum_wall_seconds(run.events_file(0), per_rank=True) / 3600
    return JobRow(
        run=str(run.path),
        job=job,
        jobs=len(list_job_ids(run)),
        state=state_name,
        why=reason,
        step=step,
        steps=steps,
        left_s=(steps - step) * step_s if steps and step_s and not main.end and state and state.active else None,
        device_hours=hours,
        cost_usd=hours * price if isinstance(price, int | float) else None,
    )


def _read_progress(run: RunDir, main: EventFollower) -> tuple[int, float]:
    """Return (last step, seconds per step), from the checkpoints where the events are unusable."""
    try:
        return int(main.steps[-1]["step"]) if main.steps else find_newest_step(run), main.mean("step_s")
    except (KeyError, TypeError, ValueError):
        return find_newest_step(run), 0.0


def _describe_state(state: commands.JobState | None, ended: dict[str, Any], main: EventFollower) -> tuple[str, str]:
    """Return (state, detail), from Slurm while a job is active, then from the run folder. The detail is why it waits or
    ended, or its hosts."""
    if state is not None and state.active:
        return state.state.lower(), state.reason if state.state == "PENDING" else state.hosts
    if main.end.get("status") == "finished":
        return "finished", ""
    if ended.get("next") == NextAttempt.ENOUGH:
        return "gave up", str(ended.get("why", ""))
    if state is not None:
        return state.state.lower(), str(main.end.get("why", ""))
    return str(main.end.get("status", "unknown")), str(main.end.get("why", ""))


def _count_steps(run: RunDir) -> int | None:
    try:
        if steps := run.recorded_spec().train.steps:
            return steps
        planned = read_json(run.path / "plan.json").get("run", {}).get("steps")
    except (PacelineError, AttributeError):
        return None
    return planned if isinstance(planned, int) else None


def find_active_jobs(given: str) -> tuple[RunDir, list[str]]:
    """Return a run and those of its jobs, or the one given, that are pending or running."""
    found = find_run(given)
    asked = [given] if is_job_id(given) else list_job_ids(found)
    active = [job for job, state in commands.fetch_job_states(asked, sure=True).items() if state.active]
    if not active:
        known = ", ".join(list_job_ids(found)) or "none"
        raise UserError(f"{found.path} has no pending or running job; its jobs: {known}", code="not-found")
    return found, active


def cancel_run(run: RunDir, jobs: Sequence[str]) -> None:
    """Record the cancellation, then cancel: the batch script must not requeue the run in between."""
    for job in jobs:
        record_job_event(run, "cancel", job=job)
    commands.run_slurm("scancel", *jobs)
