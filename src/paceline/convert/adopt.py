"""The verb `adopt`: files of other tools in, a run file and the fate of every key out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, Train, build_spec
from paceline.config.registry import BUILT_IN
from paceline.config.run_file import set_nested
from paceline.convert import run_file
from paceline.convert.derive import derive_run_file
from paceline.convert.detect import read_command_line, read_sources
from paceline.convert.draft import ConvertedKey, Draft
from paceline.convert.rules import Outcome
from paceline.errors import UserError
from paceline.io.files import write_atomic
from paceline.layout import layout_of

MOST_FILES = 32
PLACEHOLDER = "train.py"
UNASKED = ("train.lr", "train.schedule", "train.clip")
"""What a script often sets for itself, so that no other file says it. Its optimiser keeps its own learning rate."""


@dataclass(frozen=True)
class Adopted:
    """What other tools' files became."""

    text: str
    """The run file, with comments."""
    rows: tuple[ConvertedKey, ...]
    fill_in: Mapping[str, str]
    """Keys of the run file that the files did not say, with the reason."""
    values: Mapping[str, Any]
    """The run file as plain values."""
    out: Path | None = None
    """Where it was written."""

    def counts(self) -> dict[str, int]:
        """Keys by what became of them, of those that were given."""
        found = Counter(row.outcome.value for row in self.rows if row.given)
        return {outcome.value: found[outcome.value] for outcome in Outcome if found[outcome.value]}

    def as_json(self) -> dict[str, Any]:
        keys = [
            {
                "source": row.source,
                "key": row.key,
                "value": row.value,
                "became": row.outcome.value,
                "in_run_file": list(row.where),
                "why": row.why,
                "given": row.given,
            }
            for row in self.rows
        ]
        out = None if self.out is None else str(self.out)
        return {"run_file": dict(self.values), "keys": keys, "fill_in": dict(self.fill_in), "out": out}


def adopt(
    files: str | Path | Sequence[str | Path] = (),
    *,
    command: str = "",
    out: str | Path | None = None,
    force: bool = False,
) -> Adopted:
    """One run file of all that is given: `adopt(["ds_config.json", "job.sbatch"], out="run.yaml")`.

    Nothing in the files is run. Keys that contradict each other are a UserError, and nothing is written.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    target = None if out is None else Path(out)
    if not paths and not command:
        raise UserError("adopt what? write it as  paceline adopt FILE… [--out run.yaml],  or  --command 'torchrun …'")
    if target is not None and target.exists() and not force:
        raise UserError(f"{target} exists; type  --force  to write over it, or another  --out")
    draft = Draft()
    made_of = _read(draft, paths, command)
    draft.add_unsaid()
    derive_run_file(draft)
    _complete(draft, target)
    _check(draft)
    rows = tuple(_finished(draft, row) for row in draft.rows)
    draft.rows = list(rows)
    adopted = Adopted(run_file.format_run_file(draft, made_of), rows, dict(draft.fill_in), _values(draft), target)
    if target is not None:
        if not target.parent.is_dir():
            raise UserError(f"--out: there is no folder {target.parent}")
        write_atomic(target, adopted.text)
    return adopted


def _read(draft: Draft, paths: Sequence[Path], command: str) -> list[str]:
    """All sources, and the files that these name; what they are called."""
    if command:
        for source in read_command_line(command):
            draft.read(source)
    waiting, seen = list(paths), set[Path]()
    made_of = [" ".join(command.replace("\\\n", " ").split())] if command else []
    while waiting or draft.files:
        path = waiting.pop(0) if waiting else draft.files.pop(0)
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        if len(seen) > MOST_FILES:
            raise UserError(f"more than {MOST_FILES} files name each other; give those of one run")
        made_of.append(path.name)
        for source in read_sources(path):
            draft.read(source)
    return made_of


def _complete(draft: Draft, target: Path | None) -> None:
    """What every run file needs: a name, and work."""
    workload = draft.lines.get("workload")
    if workload is None:
        draft.put("workload", PLACEHOLDER, "to fill in: your script, which calls paceline.run(), or file.py:Class")
        draft.fill_in = {"workload": "nothing names the program that trains", **draft.fill_in}
    elif str(workload.value).endswith(".py"):
        file = Path(str(workload.value))
        if target is not None and not file.is_absolute():
            here = os.path.relpath(Path.cwd() / file, target.resolve().parent)
            draft.lines["workload"] = replace(workload, value=Path(here).as_posix())
    elif workload.value == "transformers" and not {"model.init_from", "model.config"} & draft.lines.keys():
        draft.fill_in = {"model.init_from": "the folder of the model, as save_pretrained writes it", **draft.fill_in}
    if str(draft.lines["workload"].value) in ("transformers", "classifier") and "data.path" not in draft.lines:
        draft.fill_in.setdefault("data.path", "where the texts are; data.source says of which kind")
    script = str(draft.lines["workload"].value).endswith(".py")
    silent = [key for key in UNASKED if key not in draft.lines and not (script and key == "train.lr")]
    if silent and not draft.has_run_file:
        defaults = ", ".join(str(Train.model_fields[key.removeprefix("train.")].default) for key in silent)
        draft.fill_in[", ".join(silent)] = f"not said here, and Paceline's defaults stand in: {defaults}"
    name = draft.lines.get("name")
    words = str(name.value) if name else Path(str(draft.lines["workload"].value)).stem
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip("-._")[:100]
    draft.put("name", clean or "run", name.comment if name else "of the run folder")


def _check(draft: Draft) -> None:
    """The run file must hold: what does not fit together is said before anything is written."""
    spec = _spec(draft)
    layout_of(spec)


def _spec(draft: Draft) -> RunSpec:
    """As far as it can be read without the user's own code."""
    values = _values(draft)
    if values.get("workload") not in BUILT_IN:
        values = {key: value for key, value in values.items() if key not in ("workload", "model", "data")}
    origins = {key: line.comment for key, line in draft.lines.items() if line.comment}
    return build_spec(values, origins)


def _values(draft: Draft) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section in run_file.ORDER:
        for key, line in draft.lines.items():
            if key.split(".")[0] == section:
                set_nested(values, key, line.value)
    return values


def _finished(draft: Draft, row: ConvertedKey) -> ConvertedKey:
    """With the keys of the run file that it went into."""
    where = tuple(
        dict.fromkeys(
            key for name in row.where for key in ([name] if name in draft.lines else draft.became.get(name, ()))
        )
    )
    if row.where and not where and row.outcome in (Outcome.TRANSLATED, Outcome.DERIVED):
        return replace(row, where=(), outcome=Outcome.NOTED, why=row.why or "for the scheduler")
    return replace(row, where=where)
