"""The verb `jobs`: where the runs stand that a scheduler was asked to train, from their folders and from Slurm."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.record.events import read_events
from paceline.record.files import print_json, read_json
from paceline.record.jobs import Next, device_seconds, jobs_of, newest_step, runs_with_jobs
from paceline.record.run_dir import RunDir
from paceline.record.units import clock
from paceline.reporting.watch import Follower
from paceline.submitting import slurm
from paceline.submitting.finding import usual_folders
from paceline.terminal import say

SHOWN = 20


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


def jobs(folders: Iterable[str | Path] = ()) -> list[JobRow]:
    """Of every run in these folders (`runs`, and where the default site puts them), newest first."""
    places = [Path(folder) for folder in folders] or usual_folders()
    runs = list(dict.fromkeys(run for folder in places for run in runs_with_jobs(folder)))
    newest = {run: jobs_of(run)[-1] for run in runs}
    states = slurm.states(newest.values())
    return [_row(run, job, states.get(job)) for run, job in newest.items()]


def _row(run: RunDir, job: str, state: slurm.JobState | None) -> JobRow:
    main = Follower(run.events_file(0))
    main.look()
    records = list(read_events(run.jobs_file))
    ended: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "ended"), {})
    price = next((r.get("usd_per_device_hour") for r in reversed(records) if r["kind"] == "submit"), None)
    word, why = _state(state, ended, main)
    step, step_s = _progress(run, main)
    steps = _steps(run)
    hours = device_seconds(run) / 3600
    return JobRow(
        run=str(run.path),
        job=job,
        jobs=len(jobs_of(run)),
        state=word,
        why=why,
        step=step,
        steps=steps,
        left_s=(steps - step) * step_s if steps and step_s and not main.end and state and state.active else None,
        device_hours=hours,
        cost_usd=hours * price if isinstance(price, int | float) else None,
    )


def _progress(run: RunDir, main: Follower) -> tuple[int, float]:
    """(the last step, how long one takes); of events that make no sense, what the checkpoints say."""
    try:
        return int(main.steps[-1]["step"]) if main.steps else newest_step(run), main.mean("step_s")
    except (KeyError, TypeError, ValueError):
        return newest_step(run), 0.0


def _state(state: slurm.JobState | None, ended: dict[str, Any], main: Follower) -> tuple[str, str]:
    """Slurm's word while a job waits or runs; afterwards what the folder says."""
    if state is not None and state.active:
        waits = state.state == "PENDING"
        return state.state.lower(), state.reason if waits else state.hosts
    if main.end.get("status") == "finished":
        return "finished", ""
    if ended.get("next") == Next.ENOUGH:
        return "gave up", str(ended.get("why", ""))
    if state is not None:
        return state.state.lower(), str(main.end.get("why", ""))
    return str(main.end.get("status", "unknown")), str(main.end.get("why", ""))


def _steps(run: RunDir) -> int | None:
    """Of the whole run: what the spec says, or the plan."""
    try:
        if steps := run.recorded_spec().train.steps:
            return steps
        planned = read_json(run.path / "plan.json").get("run", {}).get("steps")
    except (PacelineError, AttributeError):
        return None
    return planned if isinstance(planned, int) else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs (runs, and the site's)")
    parser.add_argument("--json", action="store_true", help="print every value as JSON")


def run(arguments: argparse.Namespace, console: Any) -> int:
    for folder in arguments.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of runs")
    rows = jobs(arguments.folders)
    if arguments.json:
        print_json([asdict(row) for row in rows])
        return 0
    if not rows:
        places = ", ".join(map(str, arguments.folders or usual_folders()))
        say(f"no run in {places} was submitted; send one with  paceline submit RUN.yaml")
        return 0
    console.print(_table(rows[:SHOWN]))
    if len(rows) > SHOWN:
        say(f"and {len(rows) - SHOWN} older ones; all of them with  --json")
    return 0


def _table(rows: list[JobRow]) -> Any:
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
