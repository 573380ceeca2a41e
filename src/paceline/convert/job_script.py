"""Shell scripts and files of commands: the `#SBATCH` lines, what is exported, and the command that starts ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.convert import commands, shell
from paceline.convert.rules import Outcome, Ruling
from paceline.convert.sources import Settings
from paceline.convert.tables.launchers import ENVIRONMENT, SBATCH
from paceline.errors import UserError

ASKED = re.compile(r"^#SBATCH[ \t]+(.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
PREPARES = re.compile(r"^\s*((?:module|ml|source|\.|conda|mamba|spack|cd)\s+\S.*)$", re.MULTILINE)
STARTS = re.compile(
    r"\b(torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun|sbatch|paceline|python[\d.]*|bash|sh)\b"
)
OTHER_SCHEDULERS = re.compile(r"^#(PBS|BSUB|COBALT|OAR|SGE|\$)[ \t]+(-.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
GIVEN_BY_SLURM = {
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes"),
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks_per_node",
    **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "gpus_per_node"),
}


def is_shell_script(text: str) -> bool:
    """A job script, a shell script, or a text that begins with a command that we know."""
    if ASKED.search(text) or re.match(r"#!.*\b(ba|z|da|k)?sh\b", text):
        return True
    lines = [
        line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    first = lines[0].strip().lstrip("$ ") if lines else ""
    return first.startswith("export ") or bool(commands.tool_of(re.split(r"\s+", first)))


def has_launch_command(text: str) -> bool:
    """Any line that starts ranks, in a text that is neither YAML nor Python."""
    starts = (re.split(r"\s+", line.strip()) for line in text.splitlines())
    return any(commands.tool_of(words) for words in starts)


def read_job(text: str, name: str, folder: Path) -> list[Settings]:
    """All that a script says; one command that starts ranks, or the same one for several nodes."""
    asked = _asked(text, name)
    sources = [Settings(name, SBATCH.table, asked, folder, prefix="--")] if asked else []
    body = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    given = _slurm(asked)
    variables = shell.assigned(body, given)
    sources += _environment(body, variables, name, folder)
    sources += _other_scheduler(text, name, folder)
    found = list(_commands(shell.expanded(body, {**given, **variables}), name))
    ranks = [(line, words) for line, words in found if commands.tool_of(words) != "python"] or found
    different = {shell.node_free(words) for _, words in ranks}
    if len(different) > 1:
        lines = ", ".join(str(line) for line, _ in ranks)
        last = " ".join(shlex.join(ranks[-1][1]).split())[:60]
        raise UserError(
            f"{name} starts {len(different)} different commands (lines {lines}); give the one to adopt as "
            f'--command "{last}…"'
        )
    if ranks:
        sources += commands.prefix_sources(commands.read_command(ranks[0][1], folder), name)
        sources += _beside([words for number, words in found if (number, words) not in ranks], name, folder)
    if not sources:
        raise UserError(f"{name} asks a scheduler for nothing and starts no command that adopt knows")
    return sources


def _asked(text: str, name: str) -> dict[str, Any]:
    words = [word for match in ASKED.findall(text) for word in shell.split(match, name)]
    found, rest = commands.parse_options(words, SBATCH)
    if rest:
        raise UserError(f"{name}: {rest[0]!r} is not an option of sbatch; write it as  #SBATCH --{rest[0]}")
    return found


def _commands(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of what starts a program or ranks: not `python -c`, and not a look at the machine."""
    for number, line in shell.lines_of(text):
        if STARTS.search(line):
            words = shell.first_command(line, name, commands.tool_of)
            if commands.tool_of(words) and commands.read_command(words, Path()):
                yield number, words


def _slurm(asked: Mapping[str, Any]) -> dict[str, str]:
    """What Slurm will set, as far as the script asks for it."""
    known = {variable: str(asked[option]) for variable, option in GIVEN_BY_SLURM.items() if option in asked}
    if "gres" in asked and (count := re.fullmatch(r"gpu(?::\w+)?:(\d+)", str(asked["gres"]))):
        known |= {"SLURM_GPUS_ON_NODE": count[1], "SLURM_GPUS_PER_NODE": count[1]}
    if "SLURM_NTASKS" not in known and {"nodes", "ntasks_per_node"} <= asked.keys():
        nodes, each = str(asked["nodes"]), str(asked["ntasks_per_node"])
        if nodes.isdecimal() and each.isdecimal():
            known["SLURM_NTASKS"] = str(int(nodes) * int(each))
    return known


def _other_scheduler(text: str, name: str, folder: Path) -> list[Settings]:
    """What is asked of PBS, LSF and others, which adopt does not read."""
    ruling = Ruling(Outcome.NOTED, why="for the scheduler; parallel.ranks says on how many devices")
    extra = tuple((f"#{scheduler}", value, ruling) for scheduler, value in OTHER_SCHEDULERS.findall(text))
    return [Settings(name, ENVIRONMENT, {}, folder, extra=extra)] if extra else []


def _beside(others: Sequence[Sequence[str]], name: str, folder: Path) -> list[Settings]:
    """Programs that a script runs before or after the ranks."""
    ruling = Ruling(Outcome.NOTED, why="not what starts the ranks: run it as before")
    extra = tuple(("command", shlex.join(words), ruling) for words in others)
    return [Settings(name, ENVIRONMENT, {}, folder, extra=extra)] if extra else []


def _environment(body: str, variables: Mapping[str, str], name: str, folder: Path) -> list[Settings]:
    exported = re.findall(r"^\s*export\s+([A-Za-z_]\w*)=", body, re.MULTILINE)
    known = {key: variables.get(key) for key in exported if ENVIRONMENT.rule(key) is not None}
    as_before = Ruling(Outcome.NOTED, why="for the shell: export it as before")
    extra = [(f"export {key}", variables.get(key, "…"), as_before) for key in exported if key not in known]
    extra += [(match.split()[0], match, Ruling(Outcome.NOTED, why="for the shell")) for match in PREPARES.findall(body)]
    return [Settings(name, ENVIRONMENT, known, folder, extra=tuple(extra))] if known or extra else []
