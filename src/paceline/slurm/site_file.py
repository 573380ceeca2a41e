"""Site files: what a cluster needs in every job. One per cluster, in ~/.config/paceline/sites/NAME.yaml.

What Slurm itself reports (limits of a partition, GPUs of a node) can be left out.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from pydantic import ValidationInfo, field_validator

from paceline.config import build_section
from paceline.config.run_file import read_yaml_file
from paceline.config.sections import Section, field
from paceline.errors import UserError, did_you_mean
from paceline.io.arguments import option_error, parse_hours
from paceline.planner.emit import WARN_S
from paceline.runlog.jobs import ATTEMPTS

DEFAULT_SITE = "default"
SCRATCH_VARIABLES = {"{user}": '"$(id -un)"', "{job}": '"$SLURM_JOB_ID"'}
"""Placeholders in `scratch` whose values only the job knows."""
ON_EACH_NODE = '${SLURM_JOB_NUM_NODES:+srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1}'
MAKE_SCRATCH = (
    'mkdir -p "$1" && [ -w "$1" ] || '
    '{ echo "paceline: the scratch folder $1 cannot be written on $(hostname)" >&2; exit 1; }'
)
"""The folder is an argument: if TMPDIR does not exist yet, Slurm starts tasks with another one."""


class SiteFile(Section):
    partition: str | None = field(None, "", "that jobs go to; without it Slurm's default")
    account: str | None = field(None, "", "that pays")
    qos: str | None = field(None, "", "quality of service")
    constraint: str | None = field(None, "", "features that nodes must have")
    options: dict[str, str] = field({}, "", "more options of sbatch, without dashes: {exclusive: '', nice: '100'}")
    cluster: str | None = field(None, "", "devices and links for the plan, as in a run file: 4x8xH100, or a file")
    gpus_per_node: int | None = field(None, "GPUs", "of a node; default: what Slurm reports", ge=1, le=64)
    gpu_type: str | None = field(None, "", "the name that Slurm has for them, as in --gres=gpu:a100:4")
    cpus_per_rank: int | None = field(None, "cores", "for each rank", ge=1, le=4096)
    memory: str | None = field(None, "", "host memory of a node, as 64G; without it what the plan says for cores")
    nodes: int | None = field(None, "nodes", "that a job may have at most", ge=1, le=100_000)
    fewer_nodes: bool = field(False, "", "a job may continue with fewer nodes than planned")
    time_limit: str | None = field(None, "", "of a job, as 24h; without it that of the partition")
    warn_s: int = field(WARN_S, "s", "before the limit at which a run saves and stops", ge=10, le=65535)
    attempts: int = field(ATTEMPTS, "", "in a row without progress, after which a run is left alone", ge=1, le=1000)
    modules: tuple[str, ...] = field((), "", "that are loaded before Python starts")
    setup: tuple[str, ...] = field((), "", "lines of the shell, as they are, before Python starts")
    python: str | None = field(None, "", "the interpreter on the nodes; without it the one that submits")
    container: str | None = field(None, "", "the words before Python: apptainer exec --nv image.sif")
    variables: dict[str, str] = field({}, "", "of the environment")
    runs: Path | None = field(None, "path", "where run folders go, seen by all nodes")
    logs: Path | None = field(None, "path", "where logs of jobs go; without it the run folder")
    scratch: str | None = field(None, "path", "made on each node, TMPDIR of its jobs; {user} and {job} are replaced")
    price: float | None = field(None, "USD", "per device and hour", ge=0)

    @field_validator("time_limit", "memory", "container", "scratch")
    @classmethod
    def _check_syntax(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None:
            return None
        if info.field_name == "time_limit":
            parse_hours(text)
        elif info.field_name == "memory":
            check_memory(text)
        elif info.field_name == "container":
            try:
                shlex.split(text)
            except ValueError:
                raise UserError(f"{text!r} has a quote that is not closed") from None
        elif found := re.search(r"\$\{?[A-Za-z_]\w*\}?", text, re.ASCII):
            raise UserError(f"{found[0]} is not replaced; write {{user}} or {{job}}, or the name itself")
        return text

    @property
    def hours(self) -> float | None:
        return None if self.time_limit is None else parse_hours(self.time_limit)

    @property
    def interpreter(self) -> tuple[str, ...]:
        container = shlex.split(self.container) if self.container else []
        words = (*container, self.python or ("python" if container else sys.executable))
        return tuple(map(os.path.expanduser, words))

    def lines(self, folder: Path) -> list[str]:
        found = [f"cd {shlex.quote(str(folder))} || exit"]
        if self.modules:
            found.append(f"module load {shlex.join(self.modules)}")
        found += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if self.scratch:
            parts = re.split(r"(\{user\}|\{job\})", os.path.expanduser(self.scratch))
            found += [
                f"scratch={''.join(SCRATCH_VARIABLES.get(part) or shlex.quote(part) for part in parts if part)}",
                f'{ON_EACH_NODE} sh -c {shlex.quote(MAKE_SCRATCH)} sh "$scratch" || exit',
                'export TMPDIR="$scratch"',
            ]
        return [*found, *self.setup]


def check_memory(text: str, option: str = "") -> str:
    if not re.fullmatch(r"\d+[KMGT]?", text, re.ASCII):
        given = f"{option} {text}: this" if option else repr(text)
        raise UserError(f"{given} is not an amount of memory; write it as  64G", code="invalid-value", key=option)
    return text


def read_site(name: str | Path | None = None) -> SiteFile:
    """Read the site of a name or file; without one `default.yaml`, if it exists."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "paceline" / "sites"
    if name is None:
        file = folder / f"{DEFAULT_SITE}.yaml"
        if not file.is_file():
            return SiteFile()
    else:
        file = Path(name)
        if file.suffix not in (".yaml", ".yml"):
            file = folder / f"{name}.yaml"
            if not file.is_file():
                known = sorted(path.stem for path in folder.glob("*.yaml"))
                hint = did_you_mean(name, known) or f"; {folder} has {', '.join(known) or 'none'}"
                problem = f"there is no site {name}{hint}; or give a file, as  --site FILE.yaml"
                raise option_error("--site", problem, "not-found")
    values, origins = read_yaml_file(file, "site file", "partition: gpu")
    site = build_section(SiteFile, values, origins)
    paths = {key: path for key in ("runs", "logs") if (path := getattr(site, key)) is not None}
    absolute = {key: file.resolve().parent / path.expanduser() for key, path in paths.items()}
    return site.model_copy(update=absolute)
