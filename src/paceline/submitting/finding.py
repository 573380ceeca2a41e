"""The run that somebody means: by its folder, or by the id of one of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UserError
from paceline.record.events import read_events
from paceline.record.jobs import is_job, jobs_of, runs_with_jobs
from paceline.record.run_dir import RunDir
from paceline.submitting.site_file import read_site

RUNS = Path("runs")


def usual_folders() -> list[Path]:
    """Where runs are looked for: `runs`, and where the default site puts them."""
    there = read_site().runs
    return list(dict.fromkeys([RUNS, *([there] if there is not None else [])]))


def run_of(given: str | Path) -> RunDir:
    """The run in a folder, or the one that has this job."""
    path, job = Path(given), str(given)
    if not is_job(job) or path.exists():
        return RunDir.open(path)
    folders = usual_folders()
    for run in (run for folder in folders for run in runs_with_jobs(folder)):
        if job in jobs_of(run):
            return run
    raise UserError(f"job {job}: no run in {' or '.join(map(str, folders))} has it; give the run folder instead")


def log_files(run: RunDir, jobs: Sequence[str]) -> dict[str, Path]:
    """Where each job's output goes. A job that was sent by hand logs beside the others."""
    beside, found = run.path, dict[str, Path]()
    for event in read_events(run.jobs_file, "submit"):
        log, job = event.get("log"), event.get("job")
        if isinstance(log, str) and Path(log).name == f"slurm-{job}.out":
            found[str(job)], beside = Path(log), Path(log).parent
    return {job: found.get(job) or beside / f"slurm-{job}.out" for job in jobs}
