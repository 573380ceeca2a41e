"""Submit a run, or a measurement as a job array, to Slurm."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from paceline.config import RunSpec, SpecSource, load, resolve_spec
from paceline.config.registry import is_script
from paceline.errors import PacelineError, UserError, did_you_mean
from paceline.io.arguments import make_output_folder, parse_numbers
from paceline.io.durations import parse_hours
from paceline.io.files import print_json, write_atomic, write_json
from paceline.io.terminal import print_file, print_text, warn
from paceline.planner.emit_slurm import BatchJob, build_array_script, build_batch_script
from paceline.runlog.events import read_events
from paceline.runlog.jobs import record_job_event
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.slurm import commands
from paceline.slurm.commands import SubmittedJob
from paceline.slurm.jobs import RUNS_FOLDER
from paceline.slurm.request import JobOptions, JobRequest, build_job_request, find_partition, resolve_ranks_per_node
from paceline.slurm.site_file import SiteFile, check_memory, read_site

JOB_SCRIPT = "job.sbatch"
RUN_LINES = """  {file}
  follow it with  paceline watch {run}  or  paceline logs {run} -f
  end it with  paceline cancel {run}"""
MEASURE_LINES = """  {file}
  when it is done:  paceline report {run}/ranks-*"""


def submit(
    run: SpecSource,
    *,
    site: str | Path | SiteFile | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    anyway: bool = False,
    **asked: Unpack[JobOptions],
) -> SubmittedJob:
    """Send a run (a spec, a run file, or the folder of a run to go on with) to Slurm.

    `site` is a site file or its name. What `asked` leaves out (nodes, gpus_per_node, ranks_per_node, time, partition,
    account, memory) comes from the site and the plan; a request that cannot work is refused, unless `anyway`.
    """
    if wrong := min(asked.keys() - JobOptions.__annotations__.keys(), default=None):
        raise UserError(f"submit: there is no {wrong!r} to ask for{did_you_mean(wrong, JobOptions.__annotations__)}")
    here = site if isinstance(site, SiteFile) else read_site(site)
    before = _find_unfinished(run)
    spec = before.spec() if before is not None else resolve_spec(run)
    if before is not None and not asked.keys() & {"nodes", "gpus_per_node", "ranks_per_node"}:
        asked = {**_last_machines(before), **asked}
    if not dry_run:
        commands.require_slurm()
    known = commands.list_partitions(loose=dry_run) if shutil.which("sinfo") else {}
    if known and "partition" not in asked and here.partition is None and (usual := commands.find_default_partition()):
        here = here.model_copy(update={"partition": usual})
    request = build_job_request(spec, here, asked, known, anyway=anyway)
    folder = Path(out) if out is not None else here.runs or RUNS_FOLDER
    if dry_run:
        place = before or RunDir(folder / spec.name)
        text = _render_script(request, place, here, before is not None)
        return SubmittedJob(place.path, place.path / JOB_SCRIPT, text, tuple(request.reasons))
    claimed = before or RunDir.claim(folder, spec.name, request.spec)
    try:
        return _send_job(request, claimed, here, before is not None)
    except PacelineError:
        if before is None:
            shutil.rmtree(claimed.path, ignore_errors=True)
        raise


def _find_unfinished(run: SpecSource) -> RunDir | None:
    """The folder of a run that is to go on."""
    if not isinstance(run, str | Path) or not Path(run, "spec.yaml").is_file():
        return None
    found = RunDir.open(Path(run))
    if found.summary_file.is_file() and read_summary(found.summary_file).status == "finished":
        longer = "train.steps=+100" if found.recorded_spec().train.steps else "train.epochs=+1"
        again = f"paceline train --resume {shlex.quote(str(found.path))} {longer}"
        raise UserError(f"{found.path} is finished; to train it for longer, type  {again}")
    return found


def _last_machines(run: RunDir) -> JobOptions:
    """What the last job of a run asked for."""
    last: dict[str, Any] = next(reversed(list(read_events(run.jobs_file, "submit"))), {})
    nodes, per_node = last.get("nodes"), last.get("per_node")
    if not isinstance(nodes, str) or not isinstance(per_node, int):
        return {}
    return (
        {"nodes": nodes, "gpus_per_node": per_node}
        if last.get("gpus")
        else {"nodes": nodes, "ranks_per_node": per_node}
    )


def _render_script(request: JobRequest, run: RunDir, site: SiteFile, begun: bool) -> str:
    """`begun`: the spec in the folder was written for other machines."""
    folder = run.path.resolve()
    words = [f"{key}={str(value).lower()}" for key, value in request.overrides.items()] if begun else []
    logs = site.logs or folder
    return build_batch_script(
        BatchJob(
            name=request.spec.name,
            note=request.note,
            command=("train", str(folder), *words),
            run=str(folder),
            nodes=request.nodes,
            per_node=request.per_node,
            gpus=request.gpus,
            hours=request.hours,
            log=f"{str(logs).replace('%', '%%')}/slurm-%j.out",
            options=request.options,
            setup=tuple(site.lines(Path.cwd())),
            python=site.interpreter,
            warn_s=site.warn_s,
            attempts=site.attempts,
        )
    )


def _send_job(request: JobRequest, run: RunDir, site: SiteFile, begun: bool) -> SubmittedJob:
    text = _render_script(request, run, site, begun)
    logs = site.logs or run.path.resolve()
    make_output_folder(logs, "logs")
    script = run.path / JOB_SCRIPT
    write_atomic(script, text)
    if request.plan is not None:
        write_json(run.path / "plan.json", request.plan.as_json())
    job = commands.submit_script(script)
    record_job_event(
        run,
        "submit",
        job=job,
        script=JOB_SCRIPT,
        log=str(logs / f"slurm-{job}.out"),
        nodes=request.nodes,
        per_node=request.per_node,
        gpus=request.gpus,
        usd_per_device_hour=request.usd_per_device_hour,
    )
    return SubmittedJob(run.path, script, text, tuple(request.reasons), job)


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml|RUN_FOLDER [section.key=value ...]")
    parser.add_argument("--site", metavar="NAME|FILE.yaml", help="what the cluster wants (~/.config/paceline/sites)")
    parser.add_argument("--nodes", metavar="2|1-2", help="without it what the plan chooses")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="a rank for each")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="on cores (1)")
    parser.add_argument("--time", metavar="2h", help="of one job; without it 1.3 times what is planned")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--memory", metavar="64G", help="of a node")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where runs go (runs, or what the site file says)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and send nothing")
    parser.add_argument("--anyway", action="store_true", help="send what the plan says cannot work")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--measure", action="store_true", help="send  paceline measure, a task for each of --ranks")
    parser.add_argument("--ranks", default="2", metavar="2,4,8", help="with --measure: numbers to compare with 1 (2)")


def run_submit(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in JobOptions.__annotations__}
    asked: Any = {name: value for name, value in given.items() if value is not None}
    if arguments.measure:
        sent, what = submit_measure(arguments.words, arguments, asked), MEASURE_LINES
    else:
        options: Any = {name: getattr(arguments, name) for name in ("site", "out", "dry_run", "anyway")}
        sent, what = submit(_parse_source(arguments.words), **options, **asked), RUN_LINES
    state = commands.fetch_job_states([sent.job]).get(sent.job) if sent.job else None
    if arguments.json:
        print_json({**asdict(sent), **({} if state is None else asdict(state))})
        return 0
    tell = warn if arguments.dry_run else print_text
    for reason in sent.reasons:
        tell(f"  {reason}")
    if arguments.dry_run:
        print_file(sent.script)
        return 0
    print_text(f"job {sent.job}{_describe_queue_state(state)}")
    print_text(what.format(file=sent.file, run=shlex.quote(str(sent.run))))
    return 0


def _parse_source(words: Sequence[str]) -> SpecSource:
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError("which run? write it as  paceline submit RUN.yaml [section.key=value ...]")
    first, *overrides = words
    if Path(first, "spec.yaml").is_file():
        if overrides:
            raise UserError(
                f"{overrides[0]}: {first} goes on as it began; to change what may change, type  "
                f"paceline train --resume {shlex.quote(first)} {shlex.quote(overrides[0])}"
            )
        return Path(first)
    if is_script(first):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(first), overrides)
    found: RunSpec = load(first, overrides)
    return found


def _describe_queue_state(state: commands.JobState | None) -> str:
    if state is None:
        return ""
    words = f": {state.state.lower()}"
    if state.state == "PENDING":
        words += f" ({state.reason})" if state.reason else ""
        words += f", expected to start {state.start}" if state.start else ", when it starts is not known yet"
    return words


MEASURE_SCRIPT = "measure.sbatch"


def submit_measure(words: Sequence[str], arguments: argparse.Namespace, asked: JobOptions) -> commands.SubmittedJob:
    """The script is written into the folder of the measurement and sent, unless it is a dry run."""
    if not words or "=" in words[0]:
        raise UserError("which run file? write it as  paceline submit RUN.yaml --measure --ranks 2,4")
    if named := next((name for name in ("nodes", "ranks_per_node") if name in asked), None):
        option = f"--{named.replace('_', '-')}"
        raise UserError(
            f"{option}: each task of a measurement starts its ranks on one node; say how many with  --ranks 2,4"
        )
    site = read_site(arguments.site)
    ranks = sorted(set(parse_numbers(arguments.ranks, "--ranks", different=True)) - {1})
    if not ranks:
        raise UserError(f"--ranks {arguments.ranks}: one rank is what others are compared with; give  --ranks 2,4")
    name = load(words[0], words[1:]).name
    if not arguments.dry_run:
        commands.require_slurm()
    known = commands.list_partitions(loose=arguments.dry_run) if shutil.which("sinfo") else {}
    partition = find_partition(asked.get("partition") or site.partition, known)
    resolve_ranks_per_node(asked, site.gpus_per_node or (partition.gpus if partition is not None else None), partition)
    folder = ((arguments.out or site.runs or RUNS_FOLDER) / f"{name}-measure").resolve()
    script = build_array_script(_build_measure_job(name, words, folder, site, asked, max(ranks)), ranks)
    tasks = f"an array of {len(ranks)}: one task for each of --ranks, beside 1"
    file, job = folder / MEASURE_SCRIPT, ""
    if not arguments.dry_run:
        make_output_folder(folder)
        write_atomic(file, script)
        job = commands.submit_script(file)
    return commands.SubmittedJob(folder, file, script, (tasks,), job)


def _build_measure_job(
    name: str, words: Sequence[str], folder: Path, site: SiteFile, asked: JobOptions, most: int
) -> BatchJob:
    """All ranks of a task are on one node: `measure` starts them itself."""
    on_gpu = "gpus_per_node" in asked
    if on_gpu and asked["gpus_per_node"] < most:
        raise UserError(f"--gpus-per-node {asked['gpus_per_node']}: {most} ranks need {most}")
    hours = parse_hours(asked["time"], "--time") if "time" in asked else site.hours
    if hours is None:
        raise UserError("how long may a task of the array take? give  --time 2h")
    options = {
        "partition": asked.get("partition") or site.partition,
        "account": asked.get("account") or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "cpus-per-task": str(most * (site.cpus_per_rank or 1)),
        "mem": check_memory(asked["memory"], "--memory") if "memory" in asked else site.memory,
    }
    return BatchJob(
        name=f"{name}-measure",
        note=f"{name}: measured on up to {most} ranks of a node",
        command=("measure", str(Path(words[0]).resolve()), *words[1:]),
        run=str(folder),
        nodes="1",
        per_node=1,
        gpus=(f"{site.gpu_type}:{most}" if site.gpu_type else str(most)) if on_gpu else "",
        hours=hours,
        log=f"{str(site.logs or folder).replace('%', '%%')}/slurm-%A_%a.out",
        options={**{key: value for key, value in options.items() if value}, **site.options},
        setup=tuple(site.lines(Path.cwd())),
        python=site.interpreter,
        warn_s=site.warn_s,
    )
