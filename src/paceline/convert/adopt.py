"""The verb `adopt`: convert other tools' files into a run file, and report what became of every key."""

import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Parallel, Train, build_spec
from paceline.config.registry import BUILT_IN
from paceline.config.run_file import set_nested
from paceline.convert.commands import choose_command, read_command
from paceline.convert.derive import derive_run_file
from paceline.convert.draft import ConvertedKey, Draft, RunFileLine
from paceline.convert.job_script import build_site, has_launch_command, is_shell_script, read_job
from paceline.convert.key_tables import KeyTable, load_table
from paceline.convert.python_file import parse_python, read_python
from paceline.convert.rules import Outcome
from paceline.convert.shell import evaluate_script
from paceline.convert.sources import Settings, parse_json, parse_yaml, read_config_text
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.escape import to_one_line
from paceline.io.files import flatten_keys, write_atomic
from paceline.layout import layout_of

PLACEHOLDER = "train.py"
SET_BY_SCRIPTS = ("train.global_batch", "train.optimizer", "train.lr", "train.schedule", "train.clip")
"""What a script often sets itself, so that no other file has it."""
SECTIONS = ("name", "workload", "cluster", "model", "data", "train", "parallel")
JSON_TABLES = ("deepspeed", "training_arguments")
YAML_TABLES = ("accelerate", "paceline", "lightning", "project", "deepspeed", "training_arguments")
KNOWN = (
    "DeepSpeed's JSON, TrainingArguments as JSON, Accelerate's YAML, Lightning's YAML, the YAML of a project with "
    "sections model, data and training, a job script, a command line, or a Python script that configures one of them"
)
COMMENT_COLUMN = 34
WIDTH = 118


@dataclass(frozen=True)
class Adopted:
    """What other tools' files became."""

    text: str
    """The run file, with comments."""
    rows: tuple[ConvertedKey, ...]
    fill_in: dict[str, str]
    """Keys of the run file that no file gives, with the reason."""
    values: dict[str, Any]
    """The run file as plain values."""
    out: Path | None = None
    """Where it was written."""
    site: dict[str, Any] = field(default_factory=dict)
    """What a job script says of its cluster, as a site file for `paceline submit`."""

    @property
    def site_out(self) -> Path | None:
        """Where the site file was written: `run.site.yaml` beside `run.yaml`."""
        return self.out.with_suffix(".site.yaml") if self.out is not None and self.site else None

    def counts(self) -> dict[str, int]:
        """Count the given keys by what became of them."""
        counts = Counter(row.outcome for row in self.rows if row.given)
        return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}

    def as_json(self) -> dict[str, Any]:
        keys = [row.as_json() for row in self.rows]
        out = None if self.out is None else str(self.out)
        return {"run_file": self.values, "keys": keys, "fill_in": self.fill_in, "out": out, "site": self.site}


def adopt(
    files: str | Path | Sequence[str | Path] = (),
    *,
    command: str = "",
    out: str | Path | None = None,
    force: bool = False,
) -> Adopted:
    """Convert all that is given into one run file: `adopt(["ds_config.json", "job.sbatch"], out="run.yaml")`.

    Nothing in the files is executed. Keys that contradict each other are a UserError, and nothing is written.
    """
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    target = None if out is None else Path(out)
    if not paths and not command:
        usage = "paceline adopt FILE… [--out run.yaml],  or  --command 'torchrun …'"
        raise UserError(f"adopt what? write it as  {usage}", code="missing-value")
    existing = [file for file in (target, target.with_suffix(".site.yaml")) if file.exists()] if target else []
    if existing and not force:
        reason = f"{existing[0]} exists; type  --force  to write over it, or another  --out"
        raise UserError(reason, code="conflict", key="--out")
    draft = Draft()
    names = _read_all(draft, paths, command)
    draft.add_defaults()
    derive_run_file(draft)
    _complete(draft, target)
    values = _build_values(draft)
    _check(values, draft)
    draft.rows = [_resolve_keys(draft, row) for row in draft.rows]
    text = format_run_file(draft, names)
    ranks, tasks = draft.lines.get("parallel.ranks"), (draft.value("nodes") or 1) * (draft.value("tasks_per_node") or 1)
    site = build_site(draft.sources, max(1, ranks.value // tasks) if ranks else 1)
    adopted = Adopted(text, tuple(draft.rows), draft.fill_in, values, target, site)
    if target is not None:
        if not target.parent.is_dir():
            raise UserError(f"--out: there is no folder {target.parent}", code="not-found", key="--out")
        write_atomic(target, text)
    if adopted.site_out is not None:
        head = f"# Written by  paceline adopt  from {', '.join(names)}: for  paceline submit --site"
        write_atomic(
            adopted.site_out, f"{head} {adopted.site_out}\n" + yaml.safe_dump(site, sort_keys=False, allow_unicode=True)
        )
    return adopted


def _read_all(draft: Draft, paths: Sequence[Path], command: str) -> list[str]:
    """Read all sources, and the files that these name; return what they are called."""
    names = [" ".join(command.replace("\\\n", " ").split())] if command else []
    for source in _read_command_line(command) if command else ():
        draft.add_source(source)
    draft.files[:0] = paths
    seen = set[Path]()
    while draft.files:
        path = draft.files.pop(0)
        if path.resolve() not in seen:
            seen.add(path.resolve())
            try:
                sources = _read_file(path)
            except UserError as error:
                if path in paths or error.code != "invalid-format" or not draft.leave_to_script(path):
                    raise
                continue
            names.append(path.name)
            for source in sources:
                draft.add_source(source)
    return names


def _read_file(file: Path) -> list[Settings]:
    """Return the settings in a file."""
    text, name, folder = read_config_text(file), file.name, file.parent
    if text.lstrip().startswith(("{", "[")):
        values = parse_json(text, name)
        return [Settings(name, _choose_table(JSON_TABLES, values, name), values, folder)]
    if is_shell_script(text):
        return read_job(text, name, folder)
    found, reason = None, ""
    try:
        found = parse_yaml(text, name)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        reason = f": {problem or 'neither YAML nor Python'}{f' (line {mark.line + 1})' if mark else ''}"
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


def _read_command_line(text: str) -> list[Settings]:
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
    best = max(map(load_table, names), key=lambda table: len(table.marks & keys))
    flat = [key for key, value in flatten_keys(values).items() if value not in (None, {}, [])]
    unknown = [key for key in flat if not best.knows(key)]
    if best.marks & keys and len(unknown) <= len(flat) / 2:
        return best
    shown = to_one_line(", ".join(unknown[:4])) or "nothing"
    reason = f"{name} is not recognised by its keys ({shown}); adopt reads {KNOWN}"
    raise UserError(reason, code="invalid-format", key=name)


def _complete(draft: Draft, target: Path | None) -> None:
    """Add what every run file needs: a name, and a workload."""
    line = draft.lines.get("workload")
    workload = str(line.value) if line else PLACEHOLDER
    script = workload.endswith(".py")
    if line is None:
        draft.set_line("workload", workload, "to fill in: your script, which calls paceline.run(), or file.py:Class")
        draft.fill_in = {"workload": "no file names the program that trains", **draft.fill_in}
    elif script and Path(workload).is_file() and b"paceline" not in Path(workload).read_bytes():
        reason = f"{workload} has no paceline.run() yet; the lines to change: docs/moving/README.md"
        draft.fill_in = {"workload": reason, **draft.fill_in}
    if line and script and target is not None and not Path(workload).is_absolute():
        path = os.path.relpath(Path.cwd() / workload, target.resolve().parent)
        draft.set_line("workload", Path(path).as_posix(), line.comment)
    if workload == "transformers" and not {"model.init_from", "model.config"} & draft.lines.keys():
        draft.fill_in = {"model.init_from": "the folder of the model, as save_pretrained writes it", **draft.fill_in}
    if workload in ("transformers", "classifier") and "data.path" not in draft.lines:
        draft.fill_in.setdefault("data.path", "where the texts are; data.source names their format")
    missing = [key for key in SET_BY_SCRIPTS if key not in draft.lines and key not in draft.fill_in]
    if missing and not draft.has_run_file:
        defaults = ", ".join(str(Train.model_fields[key.removeprefix("train.")].default) for key in missing)
        own = "; an optimiser that the script makes keeps its own settings" if script else ""
        draft.fill_in[", ".join(missing)] = f"not given; Paceline's defaults are {defaults}{own}"
    name = draft.lines.get("name")
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name.value) if name else Path(workload).stem).strip("-._")[:100]
    draft.set_line("name", clean or "run", name.comment if name else "of the run folder")


def _check(values: Mapping[str, Any], draft: Draft) -> None:
    """Build the run file, but for what is the user's own code, so that it is valid when written."""
    own = () if values.get("workload") in BUILT_IN else ("workload", "model", "data")
    origins = {key: line.comment for key, line in draft.lines.items() if line.comment}
    layout_of(build_spec({key: value for key, value in values.items() if key not in own}, origins))


def _build_values(draft: Draft) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section in SECTIONS:
        for key, line in draft.lines.items():
            if key.split(".")[0] == section:
                set_nested(values, key, line.value)
    return values


def _resolve_keys(draft: Draft, row: ConvertedKey) -> ConvertedKey:
    """Return the row with the keys of the run file that its value went into; mark it NOTED if there are none."""
    found = [key for name in row.run_keys for key in ([name] if name in draft.lines else draft.used.get(name, ()))]
    run_keys = tuple(dict.fromkeys(found))
    if row.run_keys and not run_keys and row.outcome in (Outcome.TRANSLATED, Outcome.DERIVED):
        return replace(row, run_keys=(), outcome=Outcome.NOTED, reason=row.reason or "for the scheduler")
    return replace(row, run_keys=run_keys)


def format_run_file(draft: Draft, names: Sequence[str]) -> str:
    """Return the text of the run file: each line with its origin, then what is left to do."""
    order = [*(f"train.{name}" for name in Train.model_fields), *(f"parallel.{name}" for name in Parallel.model_fields)]
    lines = _wrap(f"Written by  paceline adopt  from {', '.join(names)}.")
    for section in SECTIONS:
        inside = {key: line for key, line in draft.lines.items() if key.split(".")[0] == section}
        if section in inside:
            lines.append(_format_line(section, inside[section]))
        elif inside:
            lines.append(f"{section}:")
            inside_order = sorted(inside, key=lambda key: order.index(key) if key in order else -1)
            lines += [_format_line(f"  {key.partition('.')[2]}", inside[key]) for key in inside_order]
    lines += _format_block("To fill in:", [f"{key}: {reason}" for key, reason in draft.fill_in.items()])
    noted, rejected = "For the scheduler, the shell and the script:", "Not carried over:"
    for head, outcome in ((noted, Outcome.NOTED), (rejected, Outcome.NOT_SUPPORTED)):
        lines += _format_block(head, [_format_row(row) for row in draft.rows if row.outcome is outcome])
    return "\n".join(lines) + "\n"


def _format_line(key: str, line: RunFileLine) -> str:
    value = yaml.safe_dump(line.value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    text = f"{key}: {value.partition(chr(10) + '...')[0].strip()}"
    return f"{text:<{COMMENT_COLUMN}}  # {to_one_line(line.comment)}" if line.comment else text


def _format_row(row: ConvertedKey) -> str:
    value = "" if row.value is True or row.value is None else f"={to_one_line(str(row.value))}"
    return f"{row.origin}{value if row.given else ''}" + (f": {row.reason}" if row.reason else "")


def _format_block(head: str, items: Sequence[str]) -> list[str]:
    return [f"# {head}", *(line for item in items for line in _wrap(to_one_line(item), "#   "))] if items else []


def _wrap(text: str, start: str = "# ") -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, start, f"{start}  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
