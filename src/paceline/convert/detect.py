"""What a file is, by its content: its name may be anything."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from paceline.convert import commands, job_script, python_file, shell
from paceline.convert.sources import KeyTable, Settings, parse_json, parse_yaml, read_config_text
from paceline.convert.tables.accelerate import ACCELERATE
from paceline.convert.tables.deepspeed import DEEPSPEED
from paceline.convert.tables.lightning import LIGHTNING
from paceline.convert.tables.own import OWN
from paceline.convert.tables.project import PROJECT
from paceline.convert.tables.trainer import TRAINER
from paceline.errors import UserError

IN_JSON = (DEEPSPEED, TRAINER)
IN_YAML = (ACCELERATE, OWN, LIGHTNING, PROJECT, DEEPSPEED, TRAINER)
KNOWN = (
    "DeepSpeed's JSON, TrainingArguments as JSON, Accelerate's YAML, Lightning's YAML, the YAML of a project with "
    "sections model, data and training, a job script, a command line, or a Python script that configures one of them"
)


def read_sources(file: Path) -> list[Settings]:
    """The settings in a file."""
    text, name, folder = read_config_text(file), file.name, file.parent
    if not text.strip():
        raise UserError(f"{file} is empty")
    if text.lstrip().startswith(("{", "[")):
        values = parse_json(text, name)
        return [Settings(name, _likest(IN_JSON, values, name), values, folder)]
    if job_script.is_shell_script(text):
        return job_script.read_job(text, name, folder)
    found, why = None, ""
    try:
        found = parse_yaml(text, name)
    except yaml.YAMLError as error:
        why = f": {_why(error)}"
    if isinstance(found, dict):
        return [Settings(name, _likest(IN_YAML, found, name), found, folder)]
    tree = python_file.parse_python(text)
    if tree is None and job_script.has_launch_command(text):
        return job_script.read_job(text, name, folder)
    literals = python_file.read_python(tree, name, folder) if tree is not None else []
    if not literals:
        raise UserError(f"{name} is not recognised{why if tree is None else ''}; adopt reads {KNOWN}")
    return literals


def read_command_line(text: str) -> list[Settings]:
    """The settings in a command line."""
    words = shell.first_command(text, "--command", commands.tool_of)
    found = commands.read_command(words, Path())
    if not found:
        start = shlex.join(words[:1]) or "an empty command"
        raise UserError(
            f"--command: {start} starts no ranks; adopt knows torchrun, accelerate launch, deepspeed, horovodrun, "
            "mpirun, srun, sbatch and python"
        )
    return found


def _likest(tables: tuple[KeyTable, ...], values: dict[str, object], name: str) -> KeyTable:
    likeness = {table.tool: table.likeness(values) for table in tables}
    best = max(tables, key=lambda table: likeness[table.tool])
    if not likeness[best.tool]:
        keys = ", ".join(map(str, list(values)[:4])) or "nothing"
        raise UserError(f"{name} is not recognised by its keys ({keys}); adopt reads {KNOWN}")
    return best


def _why(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    at = f" (line {mark.line + 1})" if mark else ""
    return f"{getattr(error, 'problem', None) or 'neither YAML nor Python'}{at}"
