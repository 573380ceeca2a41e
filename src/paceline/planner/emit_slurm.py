"""Build batch scripts for Slurm: one task per device; the ranks find each other by the environment of srun."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import UserError
from paceline.io.arguments import format_slurm_time, option_error
from paceline.io.escape import to_one_line
from paceline.io.html_page import compile_template
from paceline.runlog.jobs import ATTEMPTS

TEMPLATES = Path(__file__).parent / "templates"
REQUEUE_CODE = 75
"""The exit code of `paceline.slurm.requeue` that asks for a requeue: EX_TEMPFAIL, a temporary failure."""
WARN_S = 120
MIN_JOB_H = 5 / 60  # asked for at least, however short a run is planned: starting takes time


@dataclass(frozen=True)
class BatchJob:
    """What a batch script contains; every text in it is the user's or the site's, and is quoted."""

    name: str
    note: str
    command: tuple[str, ...]  # of each rank: `train …`
    run: str
    nodes: str  # `2`, or `1-2` if fewer are enough
    per_node: int
    gpus: str = ""  # of a node: `4` or, with their kind, `a100:4`
    hours: float | None = None
    log: str = "slurm-%j.out"
    options: Mapping[str, str] = field(default_factory=dict)  # other options of sbatch, without their dashes
    setup: tuple[str, ...] = ()  # lines of the shell, copied as they are
    python: tuple[str, ...] = ("python",)  # what starts Python; in a container, with the words in front of it
    warn_s: int = WARN_S
    attempts: int = ATTEMPTS

    @property
    def elastic(self) -> bool:
        return "-" in self.nodes


def build_batch_script(job: BatchJob) -> str:
    return _render_script("slurm_batch.sh.j2", job, requeue=REQUEUE_CODE)


def build_array_script(job: BatchJob, ranks: Sequence[int]) -> str:
    """Build an array job: each task measures one number of ranks against one rank, in turns, on one node."""
    return _render_script("slurm_array.sh.j2", job, ranks=ranks)


def _render_script(template: str, job: BatchJob, **values: Any) -> str:
    python, command = shlex.join([*job.python, "-m"]), shlex.join(job.command)
    values |= {"note": to_one_line(job.note), "version": __version__, "directives": _list_directives(job)}
    return render_launch_template(template, job=job, python=python, command=command, **values)


def render_launch_template(file: str, **values: Any) -> str:
    """Render a file of `templates/`; nothing is escaped, the filters `shell` and `yaml` quote a value."""
    text = (TEMPLATES / file).read_text(encoding="utf-8")
    template = compile_template(text, html=False, value=lambda value: value, shell=shlex.quote, yaml=dump_yaml)
    return f"{template.render(**values)}\n"


def dump_yaml(value: Any, indent: int = 0) -> str:
    """Dump a value for a place in a template; text of several lines becomes a literal block."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, text: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_str)
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    text = re.sub(r"(?<=\n)\.\.\.\n$", "", text).removesuffix("\n")  # the marker of the end of a scalar document
    return re.sub(r"\n(?=[^\n])", "\n" + " " * indent, text)


def _list_directives(job: BatchJob) -> Iterator[str]:
    asked, options = {"job-name": job.name, "nodes": job.nodes}, dict(job.options)
    if job.elastic:
        # cores only: Slurm keeps the number of tasks of the first start, and would wait for as many nodes again
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
            raise option_error(name, "not an option of sbatch; write it without its dashes, as in  constraint")
        yield f"--{name}={quote_directive(value)}" if value else f"--{name}"
    yield "--requeue"


def _parse_cores(text: str, name: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text, re.ASCII):
        raise option_error(name, f"{text!r} is not a number of cores; write it as  {name}: '4'")
    return int(text)


def quote_directive(value: str) -> str:
    """Quote a value of a `#SBATCH` line, which sbatch reads with quotes and backslashes."""
    if not value.isprintable():
        message = f"{value!r} has control characters, which a batch script cannot have; leave them out"
        raise UserError(message, code="invalid-value")
    if re.fullmatch(r"[\w.,:;%@+=/~^*\[\]&|()-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
