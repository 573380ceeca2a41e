"""The run that somebody means: by its folder, or by the id of one of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UserError
from paceline.runlog.events import read_events
from paceline.runlog.jobs import find_runs_with_jobs, is_job_id, list_job_ids
from paceline.runlog.run_dir import RunDir
from paceline.slurm.site_file import read_site

RUNS_FOLDER = Path("runs")


def list_run_folders() -> list[Path]:
    """Where runs are looked for: `runs`, and where the default site puts them."""
    there = read_site().runs
    return list(dict.fromkeys([RUNS_FOLDER, *([there] if there is not None else [])]))


def find_run(given: str | Path) -> RunDir:
    """The run in a folder, or the one that has this job."""
    path, job = Path(given), str(given)
    if not is_job_id(job) or path.exists():
        return RunDir.open(path)
    folders = list_run_folders()
    for run in (run for folder in folders for run in find_runs_with_jobs(folder)):
        if job in list_job_ids(run):
            return run
    raise UserError(f"job {job}: no run in {' or '.join(map(str, folders))} has it; give the run folder instead")


def find_log_files(run: RunDir, jobs: Sequence[str]) -> dict[str, Path]:
    """Where each job's output goes. A job that was sent by hand logs beside the others."""
    beside, found = run.path, dict[str, Path]()
    for event in read_events(run.jobs_file, "submit"):
        log, job = event.get("log"), event.get("job")
        if isinstance(log, str) and Path(log).name == f"slurm-{job}.out":
            found[str(job)], beside = Path(log), Path(log).parent
    return {job: found.get(job) or beside / f"slurm-{job}.out" for job in jobs}
