"""Submit a run, or a measurement as a job array, to Slurm."""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from paceline.config import SpecSource, load, resolve_spec
from paceline.errors import PacelineError, UserError, did_you_mean
from paceline.io.arguments import make_output_folder, option_error, parse_hours, parse_numbers
from paceline.io.files import write_atomic, write_json
from paceline.planner.emit import BatchJob, build_batch_script
from paceline.runlog.events import read_events
from paceline.runlog.jobs import record_job_event
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.slurm import commands
from paceline.slurm.commands import Partition, SubmittedJob
from paceline.slurm.jobs import RUNS_FOLDER
from paceline.slurm.request import (
    MACHINE_OPTIONS,
    JobOptions,
    JobRequest,
    build_job_request,
    build_sbatch_options,
    find_partition,
    format_gpus,
    resolve_ranks_per_node,
)
from paceline.slurm.site_file import SiteFile, read_site

JOB_SCRIPT = "job.sbatch"
MEASURE_SCRIPT = "measure.sbatch"


def submit(
    run: SpecSource,
    *,
    site: str | Path | SiteFile | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    anyway: bool = False,
    **asked: Unpack[JobOptions],
) -> SubmittedJob:
    """Submit a run (a spec, a run file, or the folder of a run to resume) to Slurm.

    `site` is a site file or its name. What `asked` leaves out (nodes, gpus_per_node, ranks_per_node, time, partition,
    account, memory) comes from the site and the plan; a request that cannot work is rejected, unless `anyway`.
    """
    if wrong := min(asked.keys() - JobOptions.__annotations__.keys(), default=None):
        hint = did_you_mean(wrong, JobOptions.__annotations__)
        raise UserError(f"submit: there is no {wrong!r} to ask for{hint}", code="unknown-key", key=wrong)
    site = site if isinstance(site, SiteFile) else read_site(site)
    resumed = _find_unfinished(run)
    spec = resumed.spec() if resumed is not None else resolve_spec(run)
    if resumed is not None and not asked.keys() & MACHINE_OPTIONS:
        asked = {**_last_machines(resumed), **asked}
    partitions = _list_partitions(dry_run)
    site = find_site_partition(site, asked, partitions)
    request = build_job_request(spec, site, asked, partitions, anyway=anyway)
    folder = _run_folder(site, out, spec.name)
    if dry_run:
        target = resumed or RunDir(folder)
        script = render_script(request, target, site, resumed is not None)
        return SubmittedJob(target.path, target.path / JOB_SCRIPT, script, tuple(request.reasons))
    claimed = resumed or RunDir.claim(folder.parent, spec.name, request.spec)
    try:
        return _send_job(request, claimed, site, resumed is not None)
    except PacelineError:
        if resumed is None:
            shutil.rmtree(claimed.path, ignore_errors=True)
        raise


def find_site_partition(site: SiteFile, asked: JobOptions, partitions: Mapping[str, Partition]) -> SiteFile:
    """Return the site with Slurm's default partition if none is named."""
    if not partitions or "partition" in asked or site.partition is not None:
        return site
    return site.model_copy(update={"partition": commands.find_default_partition()})


def _list_partitions(dry_run: bool) -> Mapping[str, Partition]:
    if not dry_run:
        commands.require_slurm()
    return commands.list_partitions(loose=dry_run) if shutil.which("sinfo") else {}


def _find_unfinished(run: SpecSource) -> RunDir | None:
    if not isinstance(run, str | Path) or not Path(run, "spec.yaml").is_file():
        return None
    found = RunDir.open(Path(run))
    if found.summary_file.is_file() and read_summary(found.summary_file).status == "finished":
        longer = "train.steps=+100" if found.recorded_spec().train.steps else "train.epochs=+1"
        command = f"paceline train --resume {shlex.quote(str(found.path))} {longer}"
        raise UserError(f"{found.path} is finished; to train it for longer, type  {command}", code="conflict")
    return found


def _last_machines(run: RunDir) -> JobOptions:
    last: dict[str, Any] = next(reversed(list(read_events(run.jobs_file, "submit"))), {})
    nodes, per_node = last.get("nodes"), last.get("per_node")
    if not isinstance(nodes, str) or not isinstance(per_node, int):
        return {}
    return {"nodes": nodes, "gpus_per_node" if last.get("gpus") else "ranks_per_node": per_node}  # type: ignore[misc]


def _run_folder(site: SiteFile, out: str | Path | None, name: str) -> Path:
    return (Path(out) if out is not None else site.runs or RUNS_FOLDER) / name


def _build_batch_job(site: SiteFile, folder: Path, log: str = "slurm-%j.out", **values: Any) -> BatchJob:
    logs = str(site.logs or folder).replace("%", "%%")
    return BatchJob(
        run=str(folder),
        log=f"{logs}/{log}",
        setup=tuple(site.lines(Path.cwd())),
        python=site.interpreter,
        warn_s=site.warn_s,
        attempts=site.attempts,
        **values,
    )


def render_script(request: JobRequest, run: RunDir, site: SiteFile, resumed: bool) -> str:
    """Render the batch script; a resumed run gets overrides, as its spec was written for other machines."""
    folder = run.path.resolve()
    words = [f"{key}={str(value).lower()}" for key, value in request.overrides.items()] if resumed else []
    asked = {key: getattr(request, key) for key in ("note", "nodes", "per_node", "gpus", "hours", "options")}
    command = ("train", str(folder), *words)
    return build_batch_script(_build_batch_job(site, folder, name=request.spec.name, command=command, **asked))


def _send_job(request: JobRequest, run: RunDir, site: SiteFile, resumed: bool) -> SubmittedJob:
    text = render_script(request, run, site, resumed)
    logs = site.logs or run.path.resolve()
    make_output_folder(logs, "logs")
    script = run.path / JOB_SCRIPT
    write_atomic(script, text)
    if request.plan is not None:
        write_json(run.path / "plan.json", request.plan.as_json())
    job = commands.submit_script(script)
    asked = {key: getattr(request, key) for key in ("nodes", "per_node", "gpus", "usd_per_device_hour")}
    record_job_event(run, "submit", job=job, script=JOB_SCRIPT, log=str(logs / f"slurm-{job}.out"), **asked)
    return SubmittedJob(run.path, script, text, tuple(request.reasons), job)


def submit_measure(
    words: Sequence[str], ranks: str, asked: JobOptions, site_name: str | None, out: Path | None, dry_run: bool
) -> SubmittedJob:
    """Submit `paceline measure` as a job array.

    Each task compares one number of ranks with one rank, in turns on the same node, so that no difference between nodes
    is taken for a speed-up.
    """
    if not words or "=" in words[0]:
        message = "which run file? write it as  paceline submit RUN.yaml --measure --ranks 2,4"
        raise UserError(message, code="missing-value")
    for name in sorted(asked.keys() & {"nodes", "ranks_per_node"}):
        reason = "each task of a measurement starts its ranks on one node; give their number with  --ranks 2,4"
        raise option_error(f"--{name.replace('_', '-')}", reason, "conflict")
    site = read_site(site_name)
    counts = sorted(set(parse_numbers(ranks, "--ranks", different=True)) - {1})
    if not counts:
        raise option_error("--ranks", f"{ranks}: one rank is what others are compared with; give  --ranks 2,4")
    name = load(words[0], words[1:]).name
    gpus, hours, _ = _resolve_unplanned(asked, site, dry_run)
    most = max(counts)
    if gpus is not None and gpus < most:
        raise option_error("--gpus-per-node", f"{gpus}: {most} ranks need {most}", "does-not-fit")
    folder = _run_folder(site, out, f"{name}-measure").resolve()
    job = _build_batch_job(
        site,
        folder,
        "slurm-%A_%a.out",
        name=folder.name,
        note=f"{name}: measured on up to {most} ranks of a node",
        command=("measure", str(Path(words[0]).resolve()), *words[1:]),
        nodes="1",
        per_node=1,  # `measure` starts its ranks itself
        gpus=format_gpus(site.gpu_type, most) if gpus else "",
        hours=hours,
        options=build_sbatch_options(site, asked, most * (site.cpus_per_rank or 1)),
    )
    tasks = f"an array of {len(counts)}: one task for each of --ranks, beside 1"
    return _send_script(folder / MEASURE_SCRIPT, build_batch_script(job, "array", ranks=counts), tasks, dry_run)


def submit_command(
    command: Sequence[str], asked: JobOptions, site_name: str | None, out: Path | None, dry_run: bool, checkpoints: str
) -> SubmittedJob:
    """Submit a command as it is, once for each rank; the job is requeued while it saves new `checkpoints`."""
    if not re.fullmatch(r"[\w./*?{},\[\]-]*", checkpoints, re.ASCII):
        problem = f"{checkpoints!r} is not a pattern of files; write it as  --checkpoints 'out/**/*.pt'"
        raise option_error("--checkpoints", problem)
    site = read_site(site_name)
    words = strip_launcher(command, site.interpreter)
    script = next((word for word in words if word.endswith(".py")), words[-1])
    name = re.sub(r"[^\w.-]+", "-", Path(script).stem, flags=re.ASCII)
    gpus, hours, available = _resolve_unplanned(asked, site, dry_run)
    gpus = gpus or available
    nodes, per_node = str(asked.get("nodes", "1")), gpus or 1
    folder = _run_folder(site, out, name).resolve()
    job = _build_batch_job(
        site,
        folder,
        name=name,
        note=f"{name}: a command on {nodes} × {per_node} ranks",
        command=words,
        nodes=nodes,
        per_node=per_node,
        gpus=format_gpus(site.gpu_type, gpus) if gpus and "ranks_per_node" not in asked else "",
        hours=hours,
        options=build_sbatch_options(site, asked, site.cpus_per_rank),
    )
    again = f"requeued while it saves {checkpoints}" if checkpoints else "not requeued: there is no --checkpoints"
    reason = f"{nodes} × {per_node} ranks of  {shlex.join(words)}; {again}"
    text = build_batch_script(job, "command", checkpoints=checkpoints)
    return _send_script(folder / JOB_SCRIPT, text, reason, dry_run)


def strip_launcher(command: Sequence[str], python: Sequence[str]) -> tuple[str, ...]:
    """Return what each rank runs of a command: torchrun and its options are replaced by the scheduler."""
    words = list(command)
    first = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "-m"), len(words))
    if Path(words[0]).name == "torchrun" and first < len(words):
        return (*python, *words[first:])
    if words[1:3] == ["-m", "torch.distributed.run"]:
        return strip_launcher(["torchrun", *words[3:]], python)
    return tuple(words)


def _resolve_unplanned(asked: JobOptions, site: SiteFile, dry_run: bool) -> tuple[int | None, float, int | None]:
    """Return ranks per node, hours, and GPUs of a node, for a job without a plan."""
    partition = find_partition(asked, site, _list_partitions(dry_run))
    available = site.gpus_per_node or (partition.gpus if partition is not None else None)
    hours = parse_hours(asked["time"], "--time") if "time" in asked else site.hours
    if hours is None:
        raise option_error("--time", "how long may the job take? give  --time 2h", "missing-value")
    return resolve_ranks_per_node(asked, available, partition), hours, available


def _send_script(file: Path, script: str, reason: str, dry_run: bool) -> SubmittedJob:
    job = ""
    if not dry_run:
        make_output_folder(file.parent)
        write_atomic(file, script)
        job = commands.submit_script(file)
    return SubmittedJob(file.parent, file, script, (reason,), job)
