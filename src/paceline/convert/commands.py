"""Read command lines as settings: which tool starts what, with which options. Nothing is executed."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.run_file import parse_overrides
from paceline.convert.key_tables import KeyTable, load_table, load_yaml_table
from paceline.convert.rules import Outcome, Translation, accept, note, translate_file
from paceline.convert.shell import AT_RUN_TIME, SHELLS, ShellCommand, evaluate_script, is_unknown
from paceline.convert.sources import Extra, Settings

PROGRAMS = load_yaml_table("programs")
LAUNCHERS, STARTS_RANKS = PROGRAMS["launchers"], PROGRAMS["start_ranks"]
SCRIPT_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
"""The words that a shell script itself was called with."""
COMMAND_PRIORITY = 1
"""Options of `accelerate launch` replace what its YAML has, overrides what the run file has."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?(e-?\d+)?")
PYTHON = re.compile(r"python[\d.]*")
VARIABLE = re.compile(r"\$\{?\w+(\[[@*]\])?\}?|jsrun|lrun|ibrun")
"""A word that only the job or its cluster knows: before a program, a launcher or the interpreter."""
MIN_TRAINER_OPTIONS = 2
"""So many names of TrainingArguments make a script one of the Trainer,"""
COMMON_OPTIONS = {"learning_rate", "output_dir", "max_steps", "warmup_ratio", "max_grad_norm", "adam_beta1"}
"""unless all of them are these, which other scripts have too, or the batch has another name."""
LIGHTNING_VERBS = ("fit", "validate", "test", "predict")
"""Of its command line: options that begin with `trainer.` are other tools' too."""


@dataclass
class _CommandLine:
    """What is left of a command line, and the settings found so far."""

    words: list[str]
    folder: Path
    env: Mapping[str, str]
    """What a shell within it sees."""
    sources: list[Settings] = field(default_factory=list)
    unknown_launcher: str = ""

    def add(self, name: str, table: str, values: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.sources.append(Settings(name, load_table(table), values or {}, self.folder, **options))


def tool_of(words: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return the launcher or Python that a command begins with; empty if it is neither."""
    words = _as_launcher(_strip_wrappers(list(words)))
    inner = choose_command(_read_inner_shell(words, env or {}))
    return tool_of(inner.words, inner.env) if inner.words else _tool_named(words)


def _tool_named(words: Sequence[str]) -> str:
    name = Path(words[0]).name if words else ""
    if name == "accelerate":
        return name if words[1:2] == ["launch"] else ""
    if name in LAUNCHERS or name == "paceline":
        return name
    return "python" if PYTHON.fullmatch(name) else ""


def read_command(command: ShellCommand, folder: Path) -> list[Settings]:
    """Return the settings of a command, one source per tool that takes part in it."""
    line = _CommandLine(command.words, folder, command.env)
    while line.words:
        _read_environment(line)
        line.words = _as_launcher(_strip_wrappers(line.words))
        if inner := _read_inner_shell(line.words, line.env):
            line.words = choose_command(inner).words
            if extra := list_preparations(inner):
                line.add("the shell", "environment", extra=tuple(extra))
            continue
        tool = tool_of(line.words, line.env)
        if not tool:
            break
        rest = line.words[1:]
        if tool == "paceline":
            _read_paceline(line, rest)
        elif tool == "python":
            _read_program(line, "python", rest, alone=not line.unknown_launcher)
        elif tool == "accelerate":
            _read_accelerate(line, rest[1:])
        else:
            _read_launcher(line, tool, rest)
        if tool in ("python", "paceline", *STARTS_RANKS):
            break
    return line.sources


def choose_command(commands: Sequence[ShellCommand]) -> ShellCommand:
    """Return the first command that starts a known tool, as in `cd src && torchrun …`, or else the first one."""
    known = (command for command in commands if tool_of(command.words, command.env))
    return next(known, commands[0] if commands else ShellCommand([], 1, {}))


def _read_inner_shell(words: list[str], env: Mapping[str, str]) -> list[ShellCommand]:
    """Return the commands in `bash -c 'commands'`; none for another command."""
    if len(words) > 2 and Path(words[0]).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[1]):
        return evaluate_script(words[2], env, words[4:]).commands
    return []


def list_preparations(commands: Sequence[ShellCommand]) -> list[Extra]:
    """Return the commands that prepare the shell, such as `module load`."""
    words = [one.words for one in commands if one.words[0] in PROGRAMS["prepare_shell"] and not tool_of(one.words)]
    return [(first, " ".join([first, *rest]), note("for the shell")) for first, *rest in words]


def _read_environment(line: _CommandLine) -> None:
    """Read `NAME=value` and wrappers before a command."""
    before = line.words[: len(line.words) - len(_strip_wrappers(line.words))]
    given = dict(word.split("=", 1) for word in before if ASSIGNMENT.fullmatch(word))
    table = load_table("environment")
    known = {key: value for key, value in given.items() if table.rule(key) is not None}
    as_before = note("for the shell: set it as before")
    extra = [(key, value, as_before) for key, value in given.items() if key not in known]
    start = next((i for i in range(len(before)) if before[i] != "env" and _is_wrapper(before[i:])), len(before))
    if wrapper := [word for word in before[start:] if not ASSIGNMENT.fullmatch(word)]:
        translation = note("for the shell: put it before  paceline train")
        extra.append((Path(wrapper[0]).name, shlex.join(wrapper), translation))
    if found := next(filter(VARIABLE.fullmatch, line.words[: len(before) + 1]), ""):
        line.unknown_launcher = found
        extra.append(("launcher", found, note(AT_RUN_TIME, review=True)))
    if (given or extra) and tool_of(line.words, line.env):
        line.add("the shell", "environment", known, extra=tuple(extra))


def _strip_wrappers(words: list[str]) -> list[str]:
    """Drop `NAME=value`, `exec`, `nohup` and wrappers such as `docker run …` before the command itself."""
    while words:
        if Path(words[0]).name in PROGRAMS["prefixes"] or ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif (_is_wrapper(words) or VARIABLE.fullmatch(words[0])) and (start := find_program(words[1:])) is not None:
            words = words[1 + start :]
        elif VARIABLE.fullmatch(words[0]) and words[1:2] and words[1].endswith(".py"):
            return ["python", *words[1:]]
        else:
            break
    return words


def _is_wrapper(words: list[str]) -> bool:
    """Return whether a command starts another one: `docker run …`, and not `docker build …` or `conda install …`."""
    name, verb = Path(words[0]).name, words[1:2]
    runs = bool(verb) and verb[0] in PROGRAMS["wrapper_verbs"]
    return name in PROGRAMS["wrappers"] or (runs and name in PROGRAMS["wrappers_with_verbs"])


def _as_launcher(words: list[str]) -> list[str]:
    """Return `torchrun …` for `python -u -m torch.distributed.run …`, and so on; other commands as they are."""
    if words and PYTHON.fullmatch(Path(words[0]).name):
        rest = _strip_interpreter_options(words[1:])
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in PROGRAMS["modules"]:
            return [*PROGRAMS["modules"][rest[1]].split(), *rest[2:]]
    return words


def _read_launcher(line: _CommandLine, tool: str, words: list[str]) -> None:
    table = load_table(LAUNCHERS[tool])
    found, rest, extra = parse_options(words, table)
    module = found.pop("module", None)
    if tool == "sbatch" and isinstance(wrapped := found.pop("wrap", None), str):
        rest = choose_command(evaluate_script(wrapped, line.env).commands).words
    python, scheduled = bool(rest) and rest[0].endswith(".py"), tool in ("srun", "sbatch")
    started = tool_of(rest, line.env)
    if scheduled and not started and not python and (start := find_program(rest[1:])) is not None:
        extra.append(("wrapper", shlex.join(rest[: start + 1]), note("for the shell: put it before  paceline train")))
        rest = rest[start + 1 :]
        started = tool_of(rest, line.env)
    if scheduled and rest and not python and not started:
        words = rest[1:] if Path(rest[0]).name in SHELLS else rest
        script = next((word for word in words if not word.startswith("-")), rest[0])
        commands = re.fullmatch(r"-[a-z]*c", words[0]) if words else None
        none = note("no command that adopt knows", review=True)
        extra.append(("script", script, none if commands or is_unknown(script) else translate_file(script)))
        rest = []
    elif tool == "srun" and started not in STARTS_RANKS:
        extra.append(("tasks", "each", Translation(Outcome.KEPT, {"starts_tasks": True}, "one rank per task")))
    if found or extra or (tool == "torchrun" and rest and not rest[0].startswith("-")):
        line.add(tool, LAUNCHERS[tool], found, prefix="--", extra=tuple(extra))
    if tool in ("torchrun", "deepspeed") or python:
        _read_program(line, tool, ["-m", *rest] if module else rest)
        rest = []
    line.words = rest


def _read_accelerate(line: _CommandLine, words: list[str]) -> None:
    table = load_table("accelerate")
    found, rest, extra = parse_options(words, table)
    module = found.pop("module", None)
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name == "config_file":
            extra.append((name, value, translate_file(value)))
        elif name in table.switches and value is True:
            values |= table.switches[name]
        else:
            values[_key_of_option(table, name)] = value
    line.add("accelerate launch", "accelerate", values, priority=COMMAND_PRIORITY, prefix="--", extra=tuple(extra))
    _read_program(line, "accelerate launch", ["-m", *rest] if module else rest)


def _key_of_option(table: KeyTable, name: str) -> str:
    """Return the key of Accelerate's YAML for an option of `accelerate launch`, which knows no sections."""
    if name.startswith("dynamo_"):
        return f"dynamo_config.{name}"
    keys = (name, f"fsdp_config.{name}", f"deepspeed_config.{name}")
    return next((key for key in keys if key in table.rules), name)


def _strip_interpreter_options(words: list[str]) -> list[str]:
    """Drop options of Python itself, such as -u."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    return words


def _read_program(line: _CommandLine, tool: str, words: list[str], *, alone: bool = False) -> None:
    """Read the script that ranks run, and its own options."""
    words = _strip_interpreter_options(words)
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words or words[0] == "-c" or (module and words[0] in PROGRAMS["setup_modules"]):
        return
    if module and words[0] == "paceline":
        _read_paceline(line, words[1:])
        return
    script, given = words[0], [word for word in words[1:] if word not in SCRIPT_ARGUMENTS]
    claims: dict[str, Any] = {"started_alone": True} if alone else {}
    claims |= {"data.arguments": given} if given else {}
    unknown = is_unknown(script)
    if module or (unknown and not script.endswith(".py")):
        reason = "a module: name its file as" if module else f"{AT_RUN_TIME}; write it as"
        translation = Translation(Outcome.NOTED, claims, f"{reason}  workload: FILE.py", review=True)
    elif script.endswith(".py"):
        reason = f"its folder is {AT_RUN_TIME}" if unknown else "once it calls paceline.run()"
        file = Path(script).name if unknown else script
        translation = accept({"workload": file, **claims}, reason, review=unknown)
    else:
        claims.pop("data.arguments", None)
        translation = Translation(Outcome.NOTED, claims, "not a Python script")
    extra: list[Extra] = [("script", script, translation)]
    if len(given) < len(words) - 1:
        extra.append(("argument", "$@", note("the arguments of the shell script; write them into data.arguments")))
    line.add(tool, "script_options", extra=tuple(extra))
    _read_script_options(line, Path(script).name, given)


def _read_script_options(line: _CommandLine, script: str, words: list[str]) -> None:
    trainer, own = load_table("training_arguments"), load_table("script_options")
    found, rest, _ = parse_options(words, own, loose=True)
    marks = trainer.marks & found.keys()
    own_batch = any(re.search("batch_?size$", key) and trainer.rule(key) is None for key in found)
    if len(marks) >= MIN_TRAINER_OPTIONS and marks - COMMON_OPTIONS and not own_batch:
        theirs = {key: value for key, value in found.items() if trainer.rule(key) is not None}
        line.add(script, "training_arguments", theirs, prefix="--")
        found = {key: value for key, value in found.items() if key not in theirs}
    theirs = {key: value for key, value in found.items() if key.startswith("trainer.")}
    if theirs and rest[:1] and rest[0] in LIGHTNING_VERBS:
        line.add(script, "lightning", theirs, priority=COMMAND_PRIORITY, prefix="--")
        found = {key: value for key, value in found.items() if key not in theirs}
    known = {key: value for key, value in found.items() if own.rule(key) is not None}
    extra = [(f"--{key}", value, _translate_argument(value)) for key, value in found.items() if key not in known]
    extra += [("argument", word, _translate_argument(word)) for word in rest]
    if known or extra:
        line.add(script, "script_options", known, prefix="--", extra=tuple(extra))


def _translate_argument(value: Any) -> Translation:
    """Translate an argument that only the script knows."""
    if is_unknown(value):
        return note(f"{AT_RUN_TIME}; write its value into data.arguments", review=True)
    return Translation(Outcome.KEPT, {"arguments": True}, "the script reads it itself")


def _read_paceline(line: _CommandLine, words: list[str]) -> None:
    """Read `paceline train RUN.yaml section.key=value …`, as launch files have it."""
    rest = [word for word in words[1:] if not word.startswith("-")]
    files = [word for word in rest if "=" not in word or Path(word).is_file()]
    extra: list[Extra] = [("RUN.yaml", file, translate_file(file)) for file in files[:1]]
    for key, value in parse_overrides(word for word in rest if word not in files).items():
        claims = {} if value is None else {key: value}
        extra.append((key, value, Translation(Outcome.KEPT, claims, priority=COMMAND_PRIORITY)))
    line.add("paceline train", "script_options", extra=tuple(extra))


def parse_options(
    words: list[str], table: KeyTable, *, loose: bool = False
) -> tuple[dict[str, Any], list[str], list[Extra]]:
    """Return (options by name, what follows, words that are unknown). `loose`: options may be anywhere."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    unknown: list[Extra] = []
    position = 0
    while position < len(words):
        text = words[position]
        position += 1
        if text == "--" and not loose:
            return found, words[position:], unknown
        if not text.startswith("-") or text == "-" or NEGATIVE_NUMBER.fullmatch(text):
            if loose:
                rest.append(text)
            elif is_unknown(text) and not text.endswith(".py") and _starts_something(words[position:]):
                unknown.append(("options", text, note(AT_RUN_TIME, review=True)))
            else:
                return found, words[position - 1 :], unknown
            continue
        following = words[position : position + 1]
        if not loose and following and following[0].endswith(".py"):
            following = []
        name, value, taken = _parse_option(text, following, table)
        if name in table.pairs and taken:
            value, taken = " ".join(words[position : position + 2]), 2
        position += taken
        listed = found[name] if isinstance(found.get(name), list) else [found[name]] if name in found else []
        found[name] = [*listed, value] if listed else value
    return found, rest, unknown


def _parse_option(text: str, following: list[str], table: KeyTable) -> tuple[str, Any, int]:
    """Return (name, value, how many of the following words were taken)."""
    name, equals, value = text.partition("=")
    short = name.lstrip("-")
    glued = None if equals or text.startswith("--") else re.fullmatch(r"([A-Za-z])(\d\S*)", short)
    if glued and glued[1] in table.aliases and short not in table.aliases:  # -N2
        return table.aliases[glued[1]], glued[2], 0
    key = table.aliases.get(short, short.replace("-", "_"))
    if equals:
        return key, value, 0
    after = following[0] if following else "-"
    alone = key in (*table.flags, *table.switches) or (after.startswith("-") and not NEGATIVE_NUMBER.fullmatch(after))
    alone = alone or (key in table.optional_numbers and not after.isdecimal())
    if alone or (table.rule(key) is None and (after.endswith(".py") or find_program(following) == 0)):
        return key, True, 0
    return key, after, 1


def _starts_something(words: Sequence[str]) -> bool:
    return find_program(words) is not None or any(word.endswith(".py") for word in words)


def find_program(words: Sequence[str]) -> int | None:
    """Return where the command that a wrapper or launcher starts begins; None without a known one."""
    return next((i for i, word in enumerate(words) if _tool_named(words[i:]) or Path(word).name in SHELLS), None)
