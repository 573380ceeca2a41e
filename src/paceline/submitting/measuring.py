"""`submit --measure`: a sweep of `measure` as a job array.

Each task compares one number of ranks with one rank, in turns and on the same node, so that no difference between nodes
is taken for a speed-up.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.arguments import make_folder, numbers
from paceline.errors import UserError
from paceline.planning.emit_slurm import BatchJob, array_script
from paceline.record.files import write_atomic
from paceline.spec import load
from paceline.submitting import slurm
from paceline.submitting.durations import hours_of
from paceline.submitting.finding import RUNS
from paceline.submitting.machines import Asked, asked_per_node
from paceline.submitting.request import partition_of
from paceline.submitting.site_file import SiteFile, memory_of, read_site

SCRIPT = "measure.sbatch"


def submit_measure(words: Sequence[str], arguments: argparse.Namespace, asked: Asked) -> slurm.Submitted:
    """The script is written into the folder of the measurement and sent, unless it is a dry run."""
    if not words or "=" in words[0]:
        raise UserError("which run file? write it as  paceline submit RUN.yaml --measure --ranks 2,4")
    if named := next((name for name in ("nodes", "ranks_per_node") if name in asked), None):
        option = f"--{named.replace('_', '-')}"
        raise UserError(
            f"{option}: each task of a measurement starts its ranks on one node; say how many with  --ranks 2,4"
        )
    site = read_site(arguments.site)
    ranks = sorted(set(numbers(arguments.ranks, "--ranks", different=True)) - {1})
    if not ranks:
        raise UserError(f"--ranks {arguments.ranks}: one rank is what others are compared with; give  --ranks 2,4")
    name = load(words[0], words[1:]).name
    if not arguments.dry_run:
        slurm.require_slurm()
    known = slurm.partitions(loose=arguments.dry_run) if shutil.which("sinfo") else {}
    partition = partition_of(asked.get("partition") or site.partition, known)
    asked_per_node(asked, site.gpus_per_node or (partition.gpus if partition is not None else None), partition)
    folder = ((arguments.out or site.runs or RUNS) / f"{name}-measure").resolve()
    script = array_script(_job(name, words, folder, site, asked, max(ranks)), ranks)
    tasks = f"an array of {len(ranks)}: one task for each of --ranks, beside 1"
    file, job = folder / SCRIPT, ""
    if not arguments.dry_run:
        make_folder(folder)
        write_atomic(file, script)
        job = slurm.submit_script(file)
    return slurm.Submitted(folder, file, script, (tasks,), job)


def _job(name: str, words: Sequence[str], folder: Path, site: SiteFile, asked: Asked, most: int) -> BatchJob:
    """All ranks of a task are on one node: `measure` starts them itself."""
    on_gpu = "gpus_per_node" in asked
    if on_gpu and asked["gpus_per_node"] < most:
        raise UserError(f"--gpus-per-node {asked['gpus_per_node']}: {most} ranks need {most}")
    hours = hours_of(asked["time"], "--time") if "time" in asked else site.hours
    if hours is None:
        raise UserError("how long may a task of the array take? give  --time 2h")
    options = {
        "partition": asked.get("partition") or site.partition,
        "account": asked.get("account") or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "cpus-per-task": str(most * (site.cpus_per_rank or 1)),
        "mem": memory_of(asked["memory"], "--memory") if "memory" in asked else site.memory,
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
