"""The verb `submit`: a run file becomes a job. The run folder gets the batch script and remembers its jobs."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from paceline.arguments import make_folder
from paceline.errors import PacelineError, UserError, did_you_mean
from paceline.planning.emit_slurm import BatchJob, batch_script
from paceline.record.events import read_events
from paceline.record.files import print_json, write_atomic, write_json
from paceline.record.jobs import note
from paceline.record.run_dir import RunDir
from paceline.record.summary import read_summary
from paceline.registry import is_script
from paceline.spec import RunSpec, Source, load, spec_of
from paceline.submitting import slurm
from paceline.submitting.finding import RUNS
from paceline.submitting.machines import Asked
from paceline.submitting.request import JobRequest, request_of
from paceline.submitting.site_file import SiteFile, read_site
from paceline.submitting.slurm import Submitted
from paceline.terminal import hand_over, say, warn

SCRIPT = "job.sbatch"
RUN_LINES = """  {file}
  follow it with  paceline watch {run}  or  paceline logs {run} -f
  end it with  paceline cancel {run}"""
MEASURE_LINES = """  {file}
  when it is done:  paceline report {run}/ranks-*"""


def submit(
    run: Source,
    *,
    site: str | Path | SiteFile | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    anyway: bool = False,
    **asked: Unpack[Asked],
) -> Submitted:
    """Send a run (a spec, a run file, or the folder of a run to go on with) to Slurm.

    `site` is a site file or its name. What `asked` leaves out (nodes, gpus_per_node, ranks_per_node, time, partition,
    account, memory) comes from the site and the plan; a request that cannot work is refused, unless `anyway`.
    """
    if wrong := min(asked.keys() - Asked.__annotations__.keys(), default=None):
        raise UserError(f"submit: there is no {wrong!r} to ask for{did_you_mean(wrong, Asked.__annotations__)}")
    here = site if isinstance(site, SiteFile) else read_site(site)
    before = _run_there(run)
    spec = before.spec() if before is not None else spec_of(run)
    if before is not None and not asked.keys() & {"nodes", "gpus_per_node", "ranks_per_node"}:
        asked = {**_machines_before(before), **asked}
    if not dry_run:
        slurm.require_slurm()
    known = slurm.partitions(loose=dry_run) if shutil.which("sinfo") else {}
    if known and "partition" not in asked and here.partition is None and (usual := slurm.default_partition()):
        here = here.model_copy(update={"partition": usual})
    request = request_of(spec, here, asked, known, anyway=anyway)
    folder = Path(out) if out is not None else here.runs or RUNS
    if dry_run:
        place = before or RunDir(folder / spec.name)
        text = _script(request, place, here, before is not None)
        return Submitted(place.path, place.path / SCRIPT, text, tuple(request.reasons))
    claimed = before or RunDir.claim(folder, spec.name, request.spec)
    try:
        return _sent(request, claimed, here, before is not None)
    except PacelineError:
        if before is None:
            shutil.rmtree(claimed.path, ignore_errors=True)
        raise


def _run_there(run: Source) -> RunDir | None:
    """The folder of a run that is to go on."""
    if not isinstance(run, str | Path) or not Path(run, "spec.yaml").is_file():
        return None
    found = RunDir.open(Path(run))
    if found.summary_file.is_file() and read_summary(found.summary_file).status == "finished":
        longer = "train.steps=+100" if found.recorded_spec().train.steps else "train.epochs=+1"
        again = f"paceline train --resume {shlex.quote(str(found.path))} {longer}"
        raise UserError(f"{found.path} is finished; to train it for longer, type  {again}")
    return found


def _machines_before(run: RunDir) -> Asked:
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


def _script(request: JobRequest, run: RunDir, site: SiteFile, begun: bool) -> str:
    """`begun`: the spec in the folder was written for other machines."""
    folder = run.path.resolve()
    words = [f"{key}={str(value).lower()}" for key, value in request.overrides.items()] if begun else []
    logs = site.logs or folder
    return batch_script(
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


def _sent(request: JobRequest, run: RunDir, site: SiteFile, begun: bool) -> Submitted:
    text = _script(request, run, site, begun)
    logs = site.logs or run.path.resolve()
    make_folder(logs, "logs")
    script = run.path / SCRIPT
    write_atomic(script, text)
    if request.plan is not None:
        write_json(run.path / "plan.json", request.plan.as_json())
    job = slurm.submit_script(script)
    note(
        run,
        "submit",
        job=job,
        script=SCRIPT,
        log=str(logs / f"slurm-{job}.out"),
        nodes=request.nodes,
        per_node=request.per_node,
        gpus=request.gpus,
        usd_per_device_hour=request.usd_per_device_hour,
    )
    return Submitted(run.path, script, text, tuple(request.reasons), job)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, console: Any) -> int:
    given = {name: getattr(arguments, name) for name in Asked.__annotations__}
    asked: Any = {name: value for name, value in given.items() if value is not None}
    if arguments.measure:
        from paceline.submitting.measuring import submit_measure

        sent, what = submit_measure(arguments.words, arguments, asked), MEASURE_LINES
    else:
        options: Any = {name: getattr(arguments, name) for name in ("site", "out", "dry_run", "anyway")}
        sent, what = submit(_source(arguments.words), **options, **asked), RUN_LINES
    state = slurm.states([sent.job]).get(sent.job) if sent.job else None
    if arguments.json:
        print_json({**asdict(sent), **({} if state is None else asdict(state))})
        return 0
    tell = warn if arguments.dry_run else say
    for reason in sent.reasons:
        tell(f"  {reason}")
    if arguments.dry_run:
        hand_over(sent.script)
        return 0
    say(f"job {sent.job}{_queue_words(state)}")
    say(what.format(file=sent.file, run=shlex.quote(str(sent.run))))
    return 0


def _source(words: Sequence[str]) -> Source:
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
        from paceline.script.run import spec_of_script

        return spec_of_script(Path(first), overrides)
    found: RunSpec = load(first, overrides)
    return found


def _queue_words(state: slurm.JobState | None) -> str:
    if state is None:
        return ""
    words = f": {state.state.lower()}"
    if state.state == "PENDING":
        words += f" ({state.reason})" if state.reason else ""
        words += f", expected to start {state.start}" if state.start else ", when it starts is not known yet"
    return words
