"""The commands `submit`, `jobs`, `logs` and `cancel`."""

import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.arguments import load_spec
from paceline.config import RunSpec, SpecSource
from paceline.errors import PacelineError, UserError
from paceline.io.arguments import option_error, parse_numbers
from paceline.io.files import print_json
from paceline.io.format import clock, wrap_lines
from paceline.io.table import Table
from paceline.io.terminal import build_console, print_file, print_text, warn
from paceline.runlog.jobs import is_job_id, list_job_ids
from paceline.slurm import commands
from paceline.slurm.commands import JobState, fetch_job_states
from paceline.slurm.jobs import (
    JobRow,
    cancel_run,
    collect_job_rows,
    find_active_jobs,
    find_log_files,
    find_run,
    list_run_folders,
)
from paceline.slurm.queue import compare_queue
from paceline.slurm.request import JobOptions
from paceline.slurm.site_file import read_site
from paceline.slurm.submit import submit, submit_command, submit_measure

SHOWN_JOBS = 20
READ_EVERY_S = 0.5
ASK_EVERY_S = 5.0
"""The queue is polled less often than the log file is read."""
MAX_LOG_BYTES = 1 << 20
"""Only the end of a longer log is shown."""


def run_jobs(args: Namespace) -> int:
    for folder in args.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of runs", code="not-found")
    rows = collect_job_rows(args.folders)
    if args.json:
        print_json([asdict(row) for row in rows])
        return 0
    if not rows:
        folders = ", ".join(map(str, args.folders or list_run_folders()))
        print_text(f"no run in {folders} was submitted; submit one with  paceline submit RUN.yaml")
        return 0
    build_console().print(_build_jobs_table(rows[:SHOWN_JOBS]))
    if len(rows) > SHOWN_JOBS:
        print_text(f"and {len(rows) - SHOWN_JOBS} older ones; all of them with  --json")
    return 0


def _build_jobs_table(rows: list[JobRow]) -> Table:
    table = Table("run", "job", "state", "step", "left", "device-hours", "cost", left=3)
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


def run_logs(args: Namespace) -> int:
    if args.follow and args.json:
        raise option_error("--follow", "--json prints once; leave one out", "conflict")
    found = find_run(args.run)
    jobs = [args.run] if is_job_id(args.run) else list_job_ids(found)
    if not jobs:
        message = f"{found.path} was not submitted; submit it with  paceline submit RUN.yaml"
        raise UserError(message, code="not-found", key=str(found.path))
    files = find_log_files(found, jobs)
    offsets: dict[str, int] = {}
    if args.json:
        print_json([{"job": job, "log": files[job], "text": _read_new_text(job, files[job], offsets)} for job in jobs])
        return 0
    for job in jobs:
        _print_log(job, files[job], offsets, titled=len(jobs) > 1)
    if not any(offsets.values()) and not args.follow:
        state = commands.fetch_job_states(jobs).get(jobs[-1])
        print_text(f"job {jobs[-1]} has printed nothing yet" + (f": {state.state.lower()}" if state else ""))
    if args.follow:
        with suppress(KeyboardInterrupt):
            _follow_log(jobs[-1], files[jobs[-1]], offsets)
    return 0


def _follow_log(job: str, file: Path, offsets: dict[str, int]) -> None:
    """Print a log until its job has ended; later polls of the queue may fail."""
    asked, state = 0.0, None
    while True:
        if time.monotonic() - asked > ASK_EVERY_S:
            asked = time.monotonic()
            try:
                state = commands.fetch_job_states([job], sure=True).get(job)
            except PacelineError:
                if state is None:
                    raise
        _print_log(job, file, offsets)
        if state is None or not state.active:
            return
        time.sleep(READ_EVERY_S)


def _print_log(job: str, file: Path, offsets: dict[str, int], titled: bool = False) -> None:
    text = _read_new_text(job, file, offsets)
    if titled and text:
        print_text(f"── job {job}")
    print_text(text.replace("\r", "\n"), end="")  # progress bars that redraw their line


def _read_new_text(job: str, file: Path, offsets: dict[str, int]) -> str:
    """Return what a log has gained since the last call, by the `offsets` that were read."""
    if not file.is_file():  # opening a pipe would block
        return ""
    try:
        with open(file, "rb") as stream:
            length = stream.seek(0, 2)
            stream.seek(offsets.get(job, max(0, length - MAX_LOG_BYTES)))
            text = stream.read()
            offsets[job] = stream.tell()
    except OSError:
        return ""
    return text.decode(errors="replace")


def run_cancel(args: Namespace) -> int:
    commands.require_slurm()
    found = [find_active_jobs(given) for given in args.runs]  # cancel none if one cannot be found
    for run, jobs in found:
        cancel_run(run, jobs)
        if not args.json:
            later = f"paceline submit {shlex.quote(str(run.path))}"
            print_text(f"cancelled job{'s' * (len(jobs) > 1)} {', '.join(jobs)}; resume later with  {later}")
    if args.json:
        print_json([{"run": run.path, "jobs": jobs} for run, jobs in found])
    return 0


RUN_LINES = """  {file}
  follow it with  paceline watch {run}  or  paceline logs {run} -f
  end it with  paceline cancel {run}"""
MEASURE_LINES = """  {file}
  when it is done:  paceline report {run}/ranks-*"""


def run_submit(args: Namespace) -> int:
    given = {name: getattr(args, name) for name in JobOptions.__annotations__}
    asked: Any = {name: value for name, value in given.items() if value is not None}
    site, out, dry_run = args.site, args.out, args.dry_run
    if args.queue:
        return print_queue(load_spec(args.words, "submit"), asked, site, args.words, args.json)
    if args.command:
        sent = submit_command(args.command, asked, site, out, dry_run, args.checkpoints)
        lines = "  {file}"
    elif args.measure:
        sent, lines = submit_measure(args.words, args.ranks, asked, site, out, dry_run), MEASURE_LINES
    else:
        source = _parse_source(args.words)
        sent = submit(source, site=site, out=out, dry_run=dry_run, anyway=args.anyway, **asked)
        lines = RUN_LINES
    state = fetch_job_states([sent.job]).get(sent.job) if sent.job else None
    if args.json:
        print_json({**asdict(sent), **({} if state is None else asdict(state))})
        return 0
    for reason in sent.reasons:
        (warn if dry_run else print_text)(f"  {reason}")
    if dry_run:
        print_file(sent.script)
        return 0
    print_text(f"job {sent.job}{_describe_queue_state(state)}")
    print_text(lines.format(file=sent.file, run=shlex.quote(str(sent.run))))
    return 0


def print_queue(spec: RunSpec, asked: JobOptions, site: str | None, words: Sequence[str], as_json: bool) -> int:
    """Print when each number of nodes would start and end, and how to submit the best."""
    nodes = str(asked.pop("nodes", ""))
    counts = parse_numbers(nodes, "--nodes", different=True) if nodes else []
    found = compare_queue(spec, read_site(site), asked, sorted(counts))
    if as_json:
        print_json({"best": found.best.nodes, "rows": [row.as_json() for row in found.rows], "failed": found.failed})
        return 0
    print_text("\n".join(wrap_lines(found.describe(), "")))
    named = f" --site {shlex.quote(site)}" if site else ""
    print_text(f"  paceline submit {shlex.join(words)} --nodes {found.best.nodes}{named}")
    build_console().print(found.table())
    return 0


def _parse_source(words: Sequence[str]) -> SpecSource:
    if not words or not Path(words[0], "spec.yaml").is_file():
        return load_spec(words, "submit")
    first, *overrides = words
    if overrides:
        command = f"paceline train --resume {shlex.quote(first)} {shlex.quote(overrides[0])}"
        message = f"{overrides[0]}: {first} resumes as it started; to change what may change, type  {command}"
        raise UserError(message, code="conflict", key=overrides[0].partition("=")[0])
    return Path(first)


def _describe_queue_state(state: JobState | None) -> str:
    if state is None:
        return ""
    text = f": {state.state.lower()}"
    if state.state == "PENDING":
        text += f" ({state.reason})" if state.reason else ""
        text += f", expected to start {state.start}" if state.start else ", when it starts is not known yet"
    return text
