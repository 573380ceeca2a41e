"""Read shell scripts: the `#SBATCH` lines, what is exported, and the command that starts ranks.

What their cluster needs in every job, apart from the run itself, becomes a site file.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.convert.commands import PROGRAMS, find_program, list_preparations, parse_options, read_command, tool_of
from paceline.convert.draft import SECRET
from paceline.convert.key_tables import load_table
from paceline.convert.rules import note
from paceline.convert.shell import evaluate_script, is_unknown
from paceline.convert.sources import Settings
from paceline.errors import UserError
from paceline.io.arguments import format_slurm_time, parse_slurm_time

SBATCH_LINE = re.compile(r"^#SBATCH[ \t]+(.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
OTHER_SCHEDULER_LINE = re.compile(r"^#(PBS|BSUB|COBALT|OAR|SGE|\$)[ \t]+(-.+?)(?:[ \t]+#.*)?$", re.MULTILINE)
SAME = ("partition", "account", "qos", "constraint")
OPTIONS = (
    *("reservation", "exclusive", "exclude", "hint", "gpu_bind", "mail_type", "mail_user", "licenses", "nice"),
    *("wckey", "cluster", "clusters", "switches"),
)
"""Options of sbatch that a site file has as they are; others belong to the run or its log."""
CONTAINERS = ("apptainer", "singularity")
SETUP = ("source", ".", "conda", "mamba", "spack")
NODE_OPTION = re.compile(r"\0--?(node|machine)[-_]rank(=[^\0]*|\0[^\0]*|$)")
"""With its value, in words that are joined by NUL."""


def is_shell_script(text: str) -> bool:
    """Return whether a text is a job script, a shell script, or a text that begins with a known command."""
    if SBATCH_LINE.search(text) or re.match(r"#!.*\b(ba|z|da|k)?sh\b", text):
        return True
    lines = [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("export ") or bool(tool_of(first.split()))


def has_launch_command(text: str) -> bool:
    """Return whether any line starts ranks, in a text that is neither YAML nor Python."""
    return any(tool_of(line.split()) for line in text.splitlines())


def read_job(text: str, name: str, folder: Path) -> list[Settings]:
    """Return all settings of a script that starts ranks with one command, or with the same one for several nodes."""
    asked = _read_sbatch_lines(text, name)
    sources = [Settings(name, load_table("slurm"), asked, folder, prefix="--")] if asked else []
    script = evaluate_script(text, _predict_slurm_variables(asked))
    commands = [command for command in script.commands if tool_of(command.words, command.env)]
    read = [(command, read_command(command, Path())) for command in commands]
    started = [command for command, found in read if found]  # not `python -c`
    options = load_table("script_options")  # of a program, unlike `srun ray start` and `srun bash -c 'rm …'`
    programs = [command for command, found in read if any(one.table is options for one in found)] or started
    ranks = [command for command in programs if tool_of(command.words, command.env) != "python"] or programs
    different = {_strip_node_options(command.words) for command in ranks}
    if len(different) > 1:
        lines = ", ".join(str(command.line) for command in ranks)
        last = " ".join(shlex.join(ranks[-1].words).split())[:60]
        several = f"{name} starts {len(different)} different commands (lines {lines})"
        raise UserError(f'{several}; give the one to adopt as --command "{last}…"', code="conflict")
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
    if not started:
        unread = [one.words for one in script.commands if one.words[0] not in ("echo", *PROGRAMS["prepare_shell"])]
        none = note("no command that adopt knows", review=True)
        extra += [("command", shlex.join(words), none) for words in unread if find_program(words[1:-1]) is not None]
    exports = {key: value for key, value in script.exports.items() if key in table.rules}
    if exports or extra:
        sources.append(Settings(name, table, exports, folder, extra=tuple(extra)))
    if ranks:
        launched = read_command(ranks[0], folder)
        if asked and any("nodes" in step.values for step in launched if step.table is load_table("slurm")):
            sources[0] = replace(sources[0], priority=-1)  # `srun --nodes` may take a part of what is allocated
        sources += [replace(source, name=f"{name}: {source.name}") for source in launched]
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


def _strip_node_options(words: Sequence[str]) -> str:
    """Return a command without what differs between the nodes of one run."""
    return NODE_OPTION.sub("", "\0".join(words))


def _predict_slurm_variables(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return what Slurm will set, as far as the script asks for it."""
    known = {name: str(asked[option]) for name, option in PROGRAMS["slurm_variables"].items() if option in asked}
    if "gres" in asked and (count := re.fullmatch(r"gpu(?::\w+)?:(\d+)", str(asked["gres"]))):
        known |= {"SLURM_GPUS_ON_NODE": count[1], "SLURM_GPUS_PER_NODE": count[1]}
    nodes, each = str(asked.get("nodes", "")), str(asked.get("ntasks_per_node", ""))
    if "SLURM_NTASKS" not in known and nodes.isdecimal() and each.isdecimal():
        known["SLURM_NTASKS"] = str(int(nodes) * int(each))
    return known


def build_site(sources: Sequence[Settings], ranks_per_task: int) -> dict[str, Any]:
    """Return the keys of a site file; none if no `#SBATCH` line is among the sources."""
    asked = next((source.values for source in sources if source.table is load_table("slurm") and source.values), None)
    if asked is None:
        return {}
    known = {key: value for key, value in asked.items() if not is_unknown(value) and not isinstance(value, list)}
    site: dict[str, Any] = {key: str(known[key]) for key in SAME if key in known}
    options = {key: "" if known[key] is True else str(known[key]) for key in OPTIONS if key in known}
    site["options"] = {key.replace("_", "-"): value for key, value in options.items()}
    site |= _read_devices(known)
    cores = str(known.get("cpus_per_task"))
    if cores.isdecimal() and int(cores) % ranks_per_task == 0:
        site["cpus_per_rank"] = int(cores) // ranks_per_task
    if memory := re.fullmatch(r"(\d+[KMGT]?)B?", str(known.get("mem")), re.IGNORECASE):
        site["memory"] = memory[1].upper()
    if (hours := parse_slurm_time(str(known.get("time", "")))) is not None:
        site["time_limit"] = format_slurm_time(hours)
    return {key: value for key, value in (site | _read_shell(sources)).items() if value not in (None, {}, [])}


def _read_devices(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return number and kind of the GPUs of a node."""
    numbers = (str(known.get(key, 0)) for key in ("nodes", "ntasks", "ntasks_per_node"))
    nodes, tasks, each = (int(number) if number.isdecimal() else 0 for number in numbers)
    for key in ("gres", "gpus_per_node", "gpus", "gpus_per_task"):
        rule = load_table("slurm").rule(key)
        claims = rule(known[key]).claims if rule is not None and key in known else {}
        count = claims.get("gpus_per_node") or claims.get("gpus", 0) // (nodes or 1)
        if count := count or claims.get("gpus_per_task", 0) * (each or tasks // (nodes or 1) or 1):
            return {"gpus_per_node": count, "gpu_type": claims.get("device_name")}
    return {}


def _read_shell(sources: Sequence[Settings]) -> dict[str, Any]:
    """Return modules, variables, the words of a container, and lines that prepare the shell."""
    rows = [(key, str(value)) for source in sources for key, value, _ in source.extra if not is_unknown(value)]
    modules = [name for key, value in rows if key in ("module", "ml") for name in _parse_modules(value)]
    setup = [value for key, value in rows if key in SETUP and "\n" not in value]
    exports = {key.removeprefix("export "): value for key, value in rows if key.startswith("export ")}
    variables = {name: value for name, value in exports.items() if value.isprintable() and not SECRET.search(name)}
    container = next((value for key, value in rows if key in CONTAINERS), None)
    return {"modules": modules, "setup": setup, "variables": variables, "container": container}


def _parse_modules(line: str) -> list[str]:
    """Return the modules that `module load a b` and `ml a b` load."""
    words = shlex.split(line)[1:]
    if words[:1] and words[0] in ("load", "add"):
        return words[1:]
    return words if line.startswith("ml ") and words[:1] and words[0] not in ("purge", "unload", "use", "list") else []
