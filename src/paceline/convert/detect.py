"""Recognise files by their content: their names may be anything."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from paceline.convert.cloud_files import is_kubernetes, is_skypilot, read_kubernetes, read_skypilot
from paceline.convert.commands import choose_command, read_command
from paceline.convert.job_script import has_launch_command, is_shell_script, read_job
from paceline.convert.key_tables import KeyTable, load_table, paceline_table
from paceline.convert.python_file import parse_python, read_python
from paceline.convert.shell import evaluate_script
from paceline.convert.sources import Settings, parse_json, parse_yaml, read_config_text
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.files import flatten_keys

JSON_TABLES = ("deepspeed", "training_arguments")
YAML_TABLES = ("accelerate", "paceline", "lightning", "project", "deepspeed", "training_arguments")
KNOWN = (
    "DeepSpeed's JSON, TrainingArguments as JSON, Accelerate's YAML, Lightning's YAML, the YAML of a project with "
    "sections model, data and training, a job script, a task of SkyPilot, a job of Kubernetes, a command line, or a "
    "Python script that configures one of them"
)


def read_sources(file: Path) -> list[Settings]:
    """Return the settings in a file."""
    text, name, folder = read_config_text(file), file.name, file.parent
    if text.lstrip().startswith(("{", "[")):
        values = parse_json(text, name)
        return [Settings(name, _choose_table(JSON_TABLES, values, name), values, folder)]
    if is_shell_script(text):
        return read_job(text, name, folder)
    if is_kubernetes(text):
        return read_kubernetes(text, name, folder)
    found, reason = None, ""
    try:
        found = parse_yaml(text, name)
    except yaml.YAMLError as error:
        reason = f": {_describe_error(error)}"
    if isinstance(found, dict) and is_skypilot(found):
        return read_skypilot(found, name, folder)
    if isinstance(found, dict):
        return [Settings(name, _choose_table(YAML_TABLES, found, name), found, folder)]
    tree = parse_python(text)
    if tree is None and has_launch_command(text):
        return read_job(text, name, folder)
    literals = read_python(tree, name, folder) if tree is not None else []
    if not literals:
        because = reason if tree is None else ""
        raise UserError(f"{name} is not recognised{because}; adopt reads {KNOWN}", code="invalid-format", key=name)
    return literals


def read_command_line(text: str) -> list[Settings]:
    """Return the settings in a command line."""
    script = evaluate_script(text)
    if script.errors:
        raise option_error("--command", f"{script.errors[0][1]} is not valid bash", "invalid-format")
    command = choose_command(script.commands)
    found = read_command(command, Path())
    if not found:
        start = shlex.join(command.words[:1]) or "an empty command"
        launchers = "torchrun, accelerate launch, deepspeed, horovodrun, mpirun, srun, sbatch and python"
        raise option_error("--command", f"{start} starts no ranks; adopt knows {launchers}", "unknown-name")
    return found


def _choose_table(names: tuple[str, ...], values: Mapping[str, object], name: str) -> KeyTable:
    """Return the table that knows most of the keys."""
    keys = {*values, *flatten_keys(values)}
    tables = [paceline_table() if table == "paceline" else load_table(table) for table in names]
    best = max(tables, key=lambda table: len(table.marks & keys))
    flat = [key for key, value in flatten_keys(values).items() if value not in (None, {}, [])]
    unknown = [key for key in flat if not best.knows(key)]
    if best.marks & keys and len(unknown) <= len(flat) / 2:
        return best
    shown = ", ".join(map(str, list(values)[:4])) or "nothing"
    if best.marks & keys:
        shown = f"{best.tool} does not have {len(unknown)} of {len(flat)}, such as {', '.join(unknown[:3])}"
    reason = f"{name} is not recognised by its keys ({shown}); adopt reads {KNOWN}"
    raise UserError(reason, code="invalid-format", key=name)


def _describe_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    at = f" (line {mark.line + 1})" if mark else ""
    return f"{getattr(error, 'problem', None) or 'neither YAML nor Python'}{at}"
