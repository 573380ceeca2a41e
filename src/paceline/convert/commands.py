"""Command lines as settings: which tool starts what, with which options. Nothing of them is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.run_file import parse_overrides, set_nested
from paceline.convert import shell
from paceline.convert.rules import Outcome, Ruling, file_too
from paceline.convert.sources import KeyTable, Settings
from paceline.convert.tables.accelerate import ACCELERATE, FLAGS, OPTIONS
from paceline.convert.tables.launchers import (
    DEEPSPEED,
    ENVIRONMENT,
    HOROVODRUN,
    MPIRUN,
    SBATCH,
    SRUN,
    TORCHRUN,
    Launcher,
)
from paceline.convert.tables.lightning import LIGHTNING
from paceline.convert.tables.script_options import SCRIPT
from paceline.convert.tables.trainer import TRAINER

LAUNCHERS = {
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "mpirun": MPIRUN,
    "mpiexec": MPIRUN,
    "horovodrun": HOROVODRUN,
    "srun": SRUN,
    "sbatch": SBATCH,
}
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "horovod.runner.launch": "horovodrun",
}
"""Modules that are launchers, as in `python -m torch.distributed.run`."""
OPAQUE = Launcher(KeyTable("accelerate launch", {}), frozenset((*FLAGS, "module", "m", "no_python")), {"m": "module"})
BEFORE = ("exec", "time", "nohup", "sudo", "nice", "command", "then", "else", "do", "!", "{")
"""Words before a command that change nothing of what it starts."""
AROUND = frozenset(
    (
        *("env", "uv", "poetry", "pixi", "pdm", "conda", "mamba", "micromamba", "apptainer", "singularity", "docker"),
        *("podman", "shifter", "numactl", "taskset", "stdbuf", "timeout", "nsys", "ncu"),
    )
)
"""Programs that start another in an environment of its own, with options before it."""
LAST_WORD = 1
"""Options of `accelerate launch` replace what its YAML says, overrides what the run file says."""
ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
PYTHON = re.compile(r"python[\d.]*")
STARTS_RANKS = ("torchrun", "accelerate", "deepspeed")
"""Launchers of which one task per node is enough."""
TOOLS = ("pip", "venv", "virtualenv", "ensurepip", "compileall", "site")
"""Modules that prepare a machine, and train nothing."""
HF_OPTIONS = 2
"""So many names of TrainingArguments among the options of a script make it one of the Trainer."""


@dataclass
class Command:
    """What is left of a command line, and what was found so far."""

    words: list[str]
    folder: Path
    sources: list[Settings] = field(default_factory=list)


def tool_of(words: Sequence[str]) -> str:
    """The launcher or Python that a command begins with; empty where it is neither."""
    return _named(shell.inner(_without_prefix(list(words)), tool_of))


def _named(words: Sequence[str]) -> str:
    name = Path(words[0]).name if words else ""
    if name == "accelerate":
        return name if words[1:2] == ["launch"] else ""
    if name in LAUNCHERS or name == "paceline":
        return name
    return "python" if PYTHON.fullmatch(name) else ""


def read_command(words: Sequence[str], folder: Path) -> list[Settings]:
    """The settings of a command, one source per tool that takes part in it."""
    command = Command(list(words), folder)
    while command.words:
        _read_environment(command)
        command.words = shell.inner(_without_prefix(command.words), tool_of)
        tool = tool_of(command.words)
        if not tool:
            break
        _read_tool(command, tool)
        if tool in ("python", "paceline", *STARTS_RANKS):
            break
    return command.sources


def _read_environment(command: Command) -> None:
    """`NAME=value` before a command."""
    own = command.words[: len(command.words) - len(_without_prefix(command.words))]
    given = dict(word.split("=", 1) for word in own if ASSIGNED.fullmatch(word))
    known = {key: value for key, value in given.items() if ENVIRONMENT.rule(key) is not None}
    as_before = Ruling(Outcome.NOTED, why="for the shell: set it as before")
    extra = tuple((key, value, as_before) for key, value in given.items() if key not in known)
    around = next((i for i, word in enumerate(own) if Path(word).name in AROUND - {"env"}), len(own))
    if others := [word for word in own[around:] if word not in given and not ASSIGNED.fullmatch(word)]:
        ruling = Ruling(Outcome.NOTED, why="for the shell: put it before  paceline train")
        extra = (*extra, (Path(others[0]).name, shlex.join(others), ruling))
    if (given or extra) and tool_of(command.words):
        command.sources.append(Settings("the shell", ENVIRONMENT, known, command.folder, extra=extra))


def _without_prefix(words: list[str]) -> list[str]:
    while words:
        if words[0] in BEFORE or ASSIGNED.fullmatch(words[0]):
            words = words[1:]
        elif Path(words[0]).name in AROUND and (start := _start(words)):
            words = words[start:]
        else:
            break
    return words


def _start(words: list[str]) -> int:
    """Where the command within another begins; 0 where there is none that we know."""
    return next((i for i in range(1, len(words)) if _named(words[i:]) or Path(words[i]).name in shell.SHELLS), 0)


def _read_tool(command: Command, tool: str) -> None:
    rest = command.words[1:]
    if tool == "paceline":
        _read_own(command, rest)
    elif tool == "python":
        rest = _after_interpreter(rest)
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in MODULES:
            _read_launcher(command, MODULES[rest[1]], rest[2:])
        else:
            _read_program(command, "python", rest, alone=True)
    elif tool == "accelerate":
        _read_accelerate(command, rest[1:])
    else:
        _read_launcher(command, tool, rest)


def _read_launcher(command: Command, tool: str, words: list[str]) -> None:
    launcher = LAUNCHERS[tool]
    if words[:1] and words[0] in shell.CALLED_WITH:
        words = words[1:]
    found, rest = parse_options(words, launcher)
    module = found.pop("module", None)
    if tool == "sbatch" and isinstance(wrapped := found.pop("wrap", None), str):
        rest = shell.first_command(wrapped, "sbatch --wrap", tool_of)
    extra: list[tuple[str, Any, Ruling]] = []
    python, scheduled = bool(rest) and rest[0].endswith(".py"), tool in ("srun", "sbatch")
    if scheduled and rest and not python and not tool_of(rest):
        extra.append(("script", rest[0], file_too()(rest[0])))
        rest = []
    elif tool == "srun" and tool_of(rest) not in STARTS_RANKS:
        extra.append(("tasks", "each", Ruling(Outcome.KEPT, {"starts_tasks": True}, "one rank per task")))
    if found or extra:
        command.sources.append(Settings(tool, launcher.table, found, command.folder, prefix="--", extra=tuple(extra)))
    if tool in ("torchrun", "deepspeed") or python:
        _read_program(command, tool, ["-m", *rest] if module else rest)
        rest = []
    command.words = rest


def _read_accelerate(command: Command, words: list[str]) -> None:
    found, rest = parse_options(words, OPAQUE)
    module = found.pop("module", None)
    values: dict[str, Any] = {}
    extra: list[tuple[str, Any, Ruling]] = []
    for name, value in found.items():
        if name == "config_file":
            extra.append((name, value, file_too()(value)))
        elif name in FLAGS and value is True:
            _merge(values, FLAGS[name])
        else:
            set_nested(values, OPTIONS.get(name, name), value)
    command.sources.append(
        Settings("accelerate launch", ACCELERATE, values, command.folder, LAST_WORD, "--", tuple(extra))
    )
    _read_program(command, "accelerate launch", ["-m", *rest] if module else rest)


def _merge(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value


def _after_interpreter(words: list[str]) -> list[str]:
    """Without options of Python itself, such as -u."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    return words


def _read_program(command: Command, tool: str, words: list[str], *, alone: bool = False) -> None:
    """The script that ranks run, and its own options."""
    words = _after_interpreter(words)
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words or words[0] == "-c" or (module and words[0] in TOOLS):
        return
    if module and words[0] == "paceline":
        _read_own(command, words[1:])
        return
    script, given = words[0], [word for word in words[1:] if word not in shell.CALLED_WITH]
    claims: dict[str, Any] = {"started_alone": True} if alone else {}
    if module:
        ruling = Ruling(Outcome.NOTED, claims, "a module: name its file as  workload: FILE.py")
    elif script.endswith(".py"):
        unknown = "$" in script
        why = "its folder is known only when the job runs" if unknown else "once it calls paceline.run()"
        file = Path(script).name if unknown else script
        claims |= {"workload": file, **({"data.arguments": given} if given else {})}
        ruling = Ruling(Outcome.TRANSLATED, claims, why, ask=unknown)
    else:
        ruling = Ruling(Outcome.NOTED, claims, "not a Python script")
    extra: tuple[tuple[str, Any, Ruling], ...] = (("script", script, ruling),)
    if len(given) < len(words) - 1:
        ruling = Ruling(Outcome.NOTED, why="what the shell script is called with; write it into data.arguments")
        extra = (*extra, ("argument", "$@", ruling))
    command.sources.append(Settings(tool, SCRIPT, {}, command.folder, extra=extra))
    _read_script_options(command, Path(script).name, given)


def _read_script_options(command: Command, script: str, words: list[str]) -> None:
    found, rest = parse_options(words, Launcher(SCRIPT), loose=True)
    if not found and not rest:
        return
    if len(TRAINER.marks & found.keys()) >= HF_OPTIONS:
        theirs = {key: value for key, value in found.items() if TRAINER.rule(key) is not None}
        command.sources.append(Settings(script, TRAINER, theirs, command.folder, prefix="--"))
        found = {key: value for key, value in found.items() if key not in theirs}
    if theirs := {key: value for key, value in found.items() if key.startswith("trainer.")}:
        command.sources.append(Settings(script, LIGHTNING, theirs, command.folder, LAST_WORD, "--"))
        found = {key: value for key, value in found.items() if key not in theirs}
    extra = [(f"--{key}", value, _own(value)) for key, value in found.items() if SCRIPT.rule(key) is None]
    extra += [("argument", word, _own(word)) for word in rest]
    known = {key: value for key, value in found.items() if SCRIPT.rule(key) is not None}
    command.sources.append(Settings(script, SCRIPT, known, command.folder, prefix="--", extra=tuple(extra)))


def _own(value: Any) -> Ruling:
    """An argument that nobody but the script knows."""
    if isinstance(value, str) and "$" in value:
        return Ruling(Outcome.NOTED, why="known only when the job runs; write its value into data.arguments", ask=True)
    return Ruling(Outcome.KEPT, {"arguments": True}, "the script reads it itself")


def _read_own(command: Command, words: list[str]) -> None:
    """`paceline train RUN.yaml section.key=value …`, as launch files have it."""
    rest = [word for word in words[1:] if not word.startswith("-")]
    files = [word for word in rest if "=" not in word or Path(word).is_file()]
    overrides = parse_overrides(word for word in rest if word not in files)
    extra = [("RUN.yaml", file, file_too()(file)) for file in files[:1]]
    for key, value in overrides.items():
        claims = {} if value is None else {key: value}
        extra.append((key, value, Ruling(Outcome.KEPT, claims, weight=LAST_WORD)))
    command.sources.append(Settings("paceline train", SCRIPT, {}, command.folder, extra=tuple(extra)))


def parse_options(words: list[str], launcher: Launcher, *, loose: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(options by name, what follows). `loose`: of a script, whose options may stand anywhere."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        text = words[position]
        position += 1
        if text == "--" and not loose:
            return found, words[position:]
        if not text.startswith("-") or text == "-" or _is_number(text):
            if not loose:
                return found, words[position - 1 :]
            rest.append(text)
            continue
        name, value, taken = _option(text, words[position : position + 1], launcher)
        if name in launcher.pairs and taken:
            value, taken = " ".join(words[position : position + 2]), 2
        position += taken
        found[name] = value if name not in found else [*_listed(found[name]), value]
    return found, rest


def _option(text: str, following: list[str], launcher: Launcher) -> tuple[str, Any, int]:
    """(name, value, whether the next word was taken)."""
    name, equals, value = text.partition("=")
    short = name.lstrip("-")
    glued = None if equals or text.startswith("--") else re.fullmatch(r"([A-Za-z])(\d\S*)", short)
    if glued and glued[1] in launcher.aliases and short not in launcher.aliases:  # -N2
        return launcher.aliases[glued[1]], glued[2], 0
    key = launcher.aliases.get(short, short.replace("-", "_"))
    if equals:
        return key, value, 0
    known = launcher.table.rule(key) is not None
    if key in launcher.flags or not following or (following[0].startswith("-") and not _is_number(following[0])):
        return key, True, 0
    if not known and following[0].endswith(".py"):
        return key, True, 0
    return key, following[0], 1


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d*)?(e-?\d+)?", text) is not None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def prefix_sources(sources: Sequence[Settings], name: str) -> list[Settings]:
    """Sources of a file, named by it."""
    return [replace(source, name=f"{name}: {source.name}") for source in sources]
