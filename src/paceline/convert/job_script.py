"""Read shell scripts: the `#SBATCH` lines, what is exported, and the command that starts ranks."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.convert.commands import PROGRAMS, list_preparations, parse_options, read_command, tool_of
from paceline.convert.key_tables import load_table
from paceline.convert.rules import note
from paceline.convert.shell import ShellCommand, evaluate_script
from paceline.convert.sources import Settings
from paceline.errors import UserError

SBATCH_LINE = re.compile(r"^#SBATCH[ \t]+(.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
OTHER_SCHEDULER_LINE = re.compile(r"^#(PBS|BSUB|COBALT|OAR|SGE|\$)[ \t]+(-.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
NODE_OPTION = re.compile(r"--?(node|machine)[-_]rank(=.*)?")


def is_shell_script(text: str) -> bool:
    """Whether it is a job script, a shell script, or a text that begins with a known command."""
    if SBATCH_LINE.search(text) or re.match(r"#!.*\b(ba|z|da|k)?sh\b", text):
        return True
    lines = [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("export ") or bool(tool_of(first.split()))


def has_launch_command(text: str) -> bool:
    """Whether any line starts ranks, in a text that is neither YAML nor Python."""
    return any(tool_of(line.split()) for line in text.splitlines())


def read_job(text: str, name: str, folder: Path, variables: Mapping[str, str] | None = None) -> list[Settings]:
    """Return all settings of a script that starts ranks with one command, or with the same one for several nodes.

    `variables` are those that its scheduler sets, beside Slurm's.
    """
    asked = _read_sbatch_lines(text, name)
    sources = [Settings(name, load_table("slurm"), asked, folder, prefix="--")] if asked else []
    script = evaluate_script(text, {**_predict_slurm_variables(asked), **(variables or {})})
    started = [command for command in script.commands if _starts_program(command)]
    ranks = [command for command in started if tool_of(command.words, command.environment) != "python"] or started
    different = {_strip_node_options(command.words) for command in ranks}
    if len(different) > 1:
        lines = ", ".join(str(command.line) for command in ranks)
        last = " ".join(shlex.join(ranks[-1].words).split())[:60]
        raise UserError(
            f"{name} starts {len(different)} different commands (lines {lines}); give the one to adopt as "
            f'--command "{last}…"',
            code="conflict",
        )
    table, as_before = load_table("environment"), note("for the shell: export it as before")
    extra = [(f"export {key}", value, as_before) for key, value in script.exports.items() if key not in table.rules]
    extra += list_preparations(script.commands)
    asked_elsewhere = note("for the scheduler; parallel.ranks sets the number of devices")
    extra += [(f"#{other}", value, asked_elsewhere) for other, value in OTHER_SCHEDULER_LINE.findall(text)]
    if script.assumed and (asked or ranks):
        values = ", ".join(f"{name}={value}" for name, value in script.assumed.items())
        extra.append(("assumed", values, note("defaults of the script, which its caller may replace")))
    extra += [(f"line {line}", error[:60], note("it is not valid bash", review=True)) for line, error in script.errors]
    beside = note("it does not start the ranks: run it as before")
    extra += [("command", shlex.join(command.words), beside) for command in started if command not in ranks]
    exports = {key: value for key, value in script.exports.items() if key in table.rules}
    if exports or extra:
        sources.append(Settings(name, table, exports, folder, extra=tuple(extra)))
    if ranks:
        sources += [replace(source, name=f"{name}: {source.name}") for source in read_command(ranks[0], folder)]
    if not sources:
        reason = f"{name} requests nothing from a scheduler and starts no command that adopt knows"
        raise UserError(reason, code="invalid-format", key=name)
    return sources


def _read_sbatch_lines(text: str, name: str) -> dict[str, Any]:
    lines = [evaluate_script(f"sbatch {line}").commands for line in SBATCH_LINE.findall(text)]
    found, rest, _ = parse_options([word for line in lines for word in line[0].words[1:]], load_table("slurm"))
    if rest:
        reason = f"{name}: {rest[0]!r} is not an option of sbatch; write it as  #SBATCH --{rest[0]}"
        raise UserError(reason, code="unknown-key", key=rest[0])
    return found


def _starts_program(command: ShellCommand) -> bool:
    """Whether it starts a program or ranks: not `python -c`, and not a look at the machine."""
    return bool(tool_of(command.words, command.environment)) and bool(read_command(command, Path()))


def _strip_node_options(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without what differs between the nodes of one run."""
    kept, skip = list[str](), False
    for word in words:
        if NODE_OPTION.fullmatch(word):
            skip = "=" not in word
        elif skip:
            skip = False
        else:
            kept.append(word)
    return tuple(kept)


def _predict_slurm_variables(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return what Slurm will set, as far as the script asks for it."""
    known = {
        variable: str(asked[option]) for variable, option in PROGRAMS["slurm_variables"].items() if option in asked
    }
    if "gres" in asked and (count := re.fullmatch(r"gpu(?::\w+)?:(\d+)", str(asked["gres"]))):
        known |= {"SLURM_GPUS_ON_NODE": count[1], "SLURM_GPUS_PER_NODE": count[1]}
    nodes, each = str(asked.get("nodes", "")), str(asked.get("ntasks_per_node", ""))
    if "SLURM_NTASKS" not in known and nodes.isdecimal() and each.isdecimal():
        known["SLURM_NTASKS"] = str(int(nodes) * int(each))
    return known
