"""The command `submit`: send a run, or a measurement, to Slurm."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, SpecSource, load
from paceline.config.registry import is_script
from paceline.errors import UserError
from paceline.io.files import print_json
from paceline.io.terminal import print_file, print_text, warn
from paceline.slurm.commands import JobState, fetch_job_states
from paceline.slurm.request import JobOptions
from paceline.slurm.submit import submit, submit_measure

RUN_LINES = """  {file}
  follow it with  paceline watch {run}  or  paceline logs {run} -f
  end it with  paceline cancel {run}"""
MEASURE_LINES = """  {file}
  when it is done:  paceline report {run}/ranks-*"""


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml|RUN_FOLDER [section.key=value ...]")
    parser.add_argument("--site", metavar="NAME|FILE.yaml", help="what the cluster needs (~/.config/paceline/sites)")
    parser.add_argument("--nodes", metavar="2|1-2", help="default: what the plan chooses")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="a rank for each")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="on cores (1)")
    parser.add_argument("--time", metavar="2h", help="of one job; default: 1.3 times the planned time")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--memory", metavar="64G", help="of a node")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where runs go (runs, or that of the site file)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    parser.add_argument("--anyway", action="store_true", help="submit what cannot work by the plan")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--measure", action="store_true", help="submit  paceline measure, a task for each of --ranks")
    parser.add_argument("--ranks", default="2", metavar="2,4,8", help="with --measure: numbers to compare with 1 (2)")


def run_submit(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in JobOptions.__annotations__}
    asked: Any = {name: value for name, value in given.items() if value is not None}
    site, out, dry_run = arguments.site, arguments.out, arguments.dry_run
    if arguments.measure:
        sent, lines = submit_measure(arguments.words, arguments.ranks, asked, site, out, dry_run), MEASURE_LINES
    else:
        source = _parse_source(arguments.words)
        sent = submit(source, site=site, out=out, dry_run=dry_run, anyway=arguments.anyway, **asked)
        lines = RUN_LINES
    state = fetch_job_states([sent.job]).get(sent.job) if sent.job else None
    if arguments.json:
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


def _parse_source(words: Sequence[str]) -> SpecSource:
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        message = "which run? write it as  paceline submit RUN.yaml [section.key=value ...]"
        raise UserError(message, code="missing-value")
    first, *overrides = words
    if Path(first, "spec.yaml").is_file():
        if overrides:
            command = f"paceline train --resume {shlex.quote(first)} {shlex.quote(overrides[0])}"
            message = f"{overrides[0]}: {first} resumes as it started; to change what may change, type  {command}"
            raise UserError(message, code="conflict", key=overrides[0].partition("=")[0])
        return Path(first)
    if is_script(first):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(first), overrides)
    found: RunSpec = load(first, overrides)
    return found


def _describe_queue_state(state: JobState | None) -> str:
    if state is None:
        return ""
    text = f": {state.state.lower()}"
    if state.state == "PENDING":
        text += f" ({state.reason})" if state.reason else ""
        text += f", expected to start {state.start}" if state.start else ", when it starts is not known yet"
    return text
