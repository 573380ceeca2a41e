"""The batch script for Slurm: one task per device; the ranks find each other by what srun tells them.

It is written to be read, and works with `sbatch` alone. What happens when:

    before the time limit   Slurm sends USR1 to the script, the script to the ranks: they save and stop; requeued
    at the time limit       what ranks did not save in time is lost; requeued, from the newest checkpoint
    machines taken away     Slurm sends TERM to all: the ranks save and stop; Slurm itself starts the job again, or not
    a rank or a node dies   the step ends; requeued, and Slurm requeues what lost its node
    no progress             after so many attempts in a row the script gives up, and says why

Whether there is anything left to do, the run folder says, not an exit code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import __version__
from paceline.errors import UserError
from paceline.io.durations import format_slurm_time
from paceline.io.escape import to_one_line
from paceline.runlog.jobs import ATTEMPTS

REQUEUE_CODE = 75
"""The exit code of `paceline.slurm.requeue` that asks for a requeue: what mail programs call a temporary failure."""
WARN_S = 120
MIN_JOB_H = 5 / 60
"""That is asked for, however short a run is planned: starting takes time."""


@dataclass(frozen=True)
class BatchJob:
    """What a batch script says; every text in it is the user's or the site's, and is quoted."""

    name: str
    note: str
    """What it is, in a few words."""
    command: tuple[str, ...]
    """Of each rank: `train …`."""
    run: str
    """The run's folder."""
    nodes: str
    """`2`, or `1-2` where fewer will do."""
    per_node: int
    """Ranks of a node."""
    gpus: str = ""
    """Of a node: `4` or, with their kind, `a100:4`."""
    hours: float | None = None
    log: str = "slurm-%j.out"
    options: Mapping[str, str] = field(default_factory=dict)
    """More of sbatch's, without their dashes."""
    setup: tuple[str, ...] = ()
    """Lines of the shell, as they are."""
    python: tuple[str, ...] = ("python",)
    """What starts Python; in a container, with the words before it."""
    warn_s: int = WARN_S
    attempts: int = ATTEMPTS

    @property
    def elastic(self) -> bool:
        return "-" in self.nodes


SCRIPT = """#!/usr/bin/env bash
# {note}
# Written by Paceline {version}. It may be sent again with sbatch: a finished run stays as it is.
{directives}
{setup}
set +e  # an attempt that fails is looked at below, whatever was set above
asked= step=
# USR1: the time limit is near, so the ranks save and stop. TERM: the machines are taken away; the ranks know. At the
# limit itself there is no time to wait for ranks that did not stop.
trap 'asked=USR1; [ -z "$step" ] || kill -USR1 "$step"' USR1
trap 'asked=TERM; [ "$(squeue -h -j "$SLURM_JOB_ID" -o %r)" != TimeLimit ] || asked=LIMIT' TERM
# The ranks begin, go on from the newest checkpoint, or leave a finished run as it is.
srun --kill-on-bad-exit=1 {tasks}{command} --resume-or-start &
step=$!
while [ "$asked" != LIMIT ] && kill -0 "$step" 2>/dev/null; do wait "$step"; done
# The run folder says whether there is more to do.
{after} --asked "$asked"
next=$?
if [ "$next" = {again} ]; then
  job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
  scontrol requeue "${{job:-$SLURM_JOB_ID}}"
fi
exit "$next"
"""


def build_batch_script(job: BatchJob) -> str:
    """The whole script."""
    python = shlex.join([*job.python, "-m"])
    ranks = f' parallel.ranks="$((SLURM_JOB_NUM_NODES * {job.per_node}))"' if job.elastic else ""
    return SCRIPT.format(
        note=to_one_line(job.note),
        version=__version__,
        directives="\n".join(_list_directives(job)),
        setup="".join(f"{line}\n" for line in job.setup),
        tasks="".join(f"{word} " for word in _list_srun_options(job)),
        command=f"{python} paceline {shlex.join(job.command)}{ranks}",
        after=f"{python} paceline.slurm.requeue {shlex.quote(job.run)} --attempts {job.attempts}",
        again=REQUEUE_CODE,
    )


def _list_srun_options(job: BatchJob) -> Iterator[str]:
    """What srun is told of its tasks, and does not take from sbatch."""
    if job.elastic:
        yield f"--ntasks-per-node={job.per_node}"
    if cpus := job.options.get("cpus-per-task"):
        yield f"--cpus-per-task={shlex.quote(cpus)}"


ARRAY = """#!/usr/bin/env bash
# {note}
# Written by Paceline {version}. It may be sent again with sbatch: what is measured already is not measured again.
{directives}
#SBATCH --array=0-{last}
{setup}
ranks=({ranks})
n=${{ranks[$SLURM_ARRAY_TASK_ID]}}
exec {command} --ranks 1,"$n" --out {folder}/ranks-"$n"
"""


def build_array_script(job: BatchJob, ranks: Sequence[int]) -> str:
    """Each task of the array measures one number of ranks against one rank, in turns, on one node."""
    return ARRAY.format(
        note=to_one_line(job.note),
        version=__version__,
        directives="\n".join(_list_directives(job)),
        last=len(ranks) - 1,
        setup="".join(f"{line}\n" for line in job.setup),
        ranks=" ".join(map(str, ranks)),
        command=shlex.join([*job.python, "-m", "paceline", *job.command]),
        folder=shlex.quote(job.run),
    )


def _list_directives(job: BatchJob) -> Iterator[str]:
    asked, options = {"job-name": job.name, "nodes": job.nodes}, dict(job.options)
    if job.elastic:
        # Slurm keeps the number of tasks of the first start, and would wait for as many nodes again: cores alone
        asked["mincpus"] = str(job.per_node * _parse_cores(options.pop("cpus-per-task", "1"), "cpus-per-task"))
    else:
        asked["ntasks-per-node"] = str(job.per_node)
    if job.gpus:
        asked["gpus-per-node"] = job.gpus
    if job.hours is not None:
        asked["time"] = format_slurm_time(job.hours)
    asked |= {"signal": f"B:USR1@{job.warn_s}", "open-mode": "append", "output": job.log, **options}
    for name, value in asked.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UserError(f"{name!r} is not an option of sbatch; write it without its dashes, as in  constraint")
        yield f"#SBATCH --{name}={quote_directive(value)}" if value else f"#SBATCH --{name}"
    yield "#SBATCH --requeue"


def _parse_cores(text: str, name: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text, re.ASCII):
        raise UserError(f"{name}: {text!r} is not a number of cores; write it as  {name}: '4'")
    return int(text)


def quote_directive(value: str) -> str:
    """A value of a `#SBATCH` line, whose words sbatch reads with quotes and backslashes of its own."""
    if not value.isprintable():
        raise UserError(f"{value!r} cannot stand in a batch script: it has control characters; leave them out")
    if re.fullmatch(r"[\w.,:;%@+=/~^*\[\]&|()-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
