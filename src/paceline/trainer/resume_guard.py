"""Check that a resumed run gives the same answer: same values, data and code, or a longer length.

It is sealed with every checkpoint, and compared before the run goes on: an answer does not change without a word.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, Train
from paceline.config.registry import find_entry, get_user_module
from paceline.config.trust import find_user_code
from paceline.errors import UserError
from paceline.io.files import MOST_DIGITS
from paceline.runlog.run_dir import RunDir
from paceline.workload import BaseWorkload, LogFn

MAY_CHANGE = (
    "name",
    "parallel.",
    *(f"train.{word}" for word in ("keep", "log_every", "loggers", "patience", "checkpoint", "nonfinite", "on_oom")),
    *("train.evaluate_every", "train.evaluate_on"),
    *(f"data.{word}" for word in ("path", "test_path", "cache", "tokenizer", "workers", "memory", "arguments")),
)
"""What a resumed run may be given anew: nothing that would change its answer. Data and weights may move, not differ."""
MUST_STAY = ("parallel.reduce", "parallel.local_steps")
ANSWER_KEY = "answer"
"""Its entry in a checkpoint."""


def describe_answer(workload: BaseWorkload) -> dict[str, Any]:
    """As a checkpoint keeps it: the values themselves, so that a change can be named."""
    return {
        "spec": collect_determining_values(workload.spec),
        "length": length_of(workload.spec.train),
        "data": workload.fingerprint(),
        "code": {name: _digest([file]) for name, file in find_user_files(workload.spec).items()},
        "workload": _digest(sorted(list_workload_files(workload.spec))),
    }


def collect_determining_values(spec: RunSpec) -> dict[str, Any]:
    """The values that change the answer, as JSON. Of files and folders it is the content that counts, not the place.

    What a script's own objects decide (its optimiser's learning rate) is in its code.
    """
    values, found = spec.dump(), {}
    for key, *_ in spec.fields():
        section, _, name = key.partition(".")
        at_a_place = name and name in (*getattr(spec, section).paths(), *getattr(spec, section).references)
        by_script = spec.origin(key).startswith("the script's")
        if _is_fixed(key, spec) and not (at_a_place or by_script) and section not in ("workload", "cluster"):
            found[key] = values[section][name] if name else values[section]
    return found


def check_same_request(run: RunDir, spec: RunSpec) -> None:
    """A run goes on as it began: whatever is asked for that would change its answer is refused by name."""
    if (before := run.recorded_spec().workload) != spec.workload:
        raise _answer_changed(run, "workload", before, spec.workload)
    old = {key: value for key, value, _, _ in run.spec_like(spec).fields()}
    for key, value, _, _ in spec.fields():
        if old.get(key) != value and _is_fixed(key, spec):
            raise _answer_changed(run, key, old.get(key), value)
    find_extension(run, spec)


def check_same_answer(run: RunDir, workload: BaseWorkload, say: LogFn, changed_code: bool = False) -> None:
    """What the newest checkpoint of a run was made with is what there is now, or a UserError says what is not."""
    sealed, step = _read_newest_answer(run)
    began = sealed.get("data", run.start().get("data"))
    if began is not None and began != workload.fingerprint():
        raise UserError(
            f"{run.path} was begun on other data: what data.path or the installed packages hold has changed since; "
            "bring it back, or start a new run"
        )
    _check_same_length(run, sealed, step)
    if (changed := find_changed_value(run, workload.spec, sealed, step)) is not None:
        said, key, value = changed
        raise UserError(f"{said} or, if it is meant, {_suggest_new_run(run, workload, key, value)}")
    for name, file in find_user_files(workload.spec).items():
        if sealed.get("code", {}).get(name, digest := _digest([file])) == digest:
            continue
        told = f"{file} has changed since the checkpoint of step {step} was saved"
        if not changed_code:
            raise UserError(
                f"{told}; bring it back, or go on with it as it is now:  "
                f"paceline train --resume {shlex.quote(str(run.path))} --changed-code"
            )
        say(f"{told}; the run goes on with it as it is now")
    if sealed.get("workload", digest := _digest(sorted(list_workload_files(workload.spec)))) != digest:
        say(f"the code of {workload.spec.workload} is another version than at step {step}; results may differ slightly")


def _check_same_length(run: RunDir, sealed: Mapping[str, Any], step: int) -> None:
    """A run is made longer by a word that is typed, which its spec says from then on."""
    spec = run.recorded_spec()
    key, now = length_of(spec.train)
    before = sealed.get("length", [key, now])
    if before != [key, now] and not (before[0] == key and parse_extended_from(spec.origin(key)) >= before[1]):
        longer = f"paceline train --resume {shlex.quote(str(run.path))} {before[0]}=+2"
        raise UserError(
            f"{run.spec_file} says {key}={now}, but the checkpoint of step {step} was made with "
            f"{before[0]}={before[1]}; put it back and, to go on for longer, add to it:  {longer}"
        )


def find_changed_value(run: RunDir, spec: RunSpec, sealed: Mapping[str, Any], step: int) -> tuple[str, str, Any] | None:
    """(what is wrong, the key, its value) where a spec is not the one that a checkpoint was made with."""
    now = collect_determining_values(spec)
    for key, before in sealed.get("spec", {}).items():
        if key in now and now[key] != before:
            said = (
                f"{run.spec_file} says {key}={now[key]}, but the checkpoint of step {step} was made with {key}={before}"
            )
            return f"{said}; put it back", key, now[key]
    return None


def find_user_files(spec: RunSpec) -> dict[str, Path]:
    """The files of the user's own that a spec names, code and run files, each by a name that it keeps if it moves."""
    code = [
        place
        for reference in find_user_code(spec.dump())
        if (place := Path(get_user_module(reference))).suffix == ".py"
    ]
    sections = (spec.model, spec.data)
    listed = [Path(file) for section in sections for key in section.run_files for file in getattr(section, key)]
    found: dict[str, Path] = {}
    for file in dict.fromkeys(file for file in (*code, *listed) if file.is_file()):
        again = sum(other.name == file.name for other in found.values())
        found[f"{file.name} ({again + 1})" if again else file.name] = file
    return found


def _is_fixed(key: str, spec: RunSpec) -> bool:
    """Whether a value is for good, once a run has begun."""
    entry = spec.entry
    may_change = MAY_CHANGE + ("model.init_from",) * entry.batched + LENGTHS * (entry.batched or entry.extends)
    return key in MUST_STAY or not key.startswith(may_change)


def _read_newest_answer(run: RunDir) -> tuple[Mapping[str, Any], int]:
    """What the newest checkpoint says of its answer, and its step; its tensors are verified where they are read."""
    from paceline.trainer.checkpoint.reader import DamagedCheckpoint, list_sealed, verify_checkpoint

    for path in list_sealed(run.checkpoints):
        with suppress(DamagedCheckpoint):
            checkpoint = verify_checkpoint(path, checksums=False)
            return read_sealed_answer(checkpoint.meta), checkpoint.step
    return {}, 0


def read_sealed_answer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its answer, as far as it is of the kind that `answer_of` makes."""
    found = meta.get(ANSWER_KEY)
    whole = isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in ("spec", "code"))
    return found if isinstance(found, dict) and whole and _is_length(found.get("length", ["", 0])) else {}


def _is_length(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [str, int]


def _suggest_new_run(run: RunDir, workload: BaseWorkload, key: str, value: Any) -> str:
    if not workload.spec.entry.batched:
        return "start a new run"
    given = shlex.quote(f"{key}={'null' if value is None else value}")
    return f"begin another run with its weights:  paceline train --from {shlex.quote(str(run.path))} {given}"


def _answer_changed(run: RunDir, key: str, before: Any, now: Any) -> UserError:
    return UserError(
        f"{run.path} was begun with {key}={before} and cannot go on with {key}={now}; "
        "leave it as it was, or start a new run"
    )


def list_workload_files(spec: RunSpec) -> list[Path]:
    """The files of a workload that comes with Paceline or with an installed package."""
    if get_user_module(spec.workload):
        return []
    found = find_spec(find_entry(spec.workload).run.partition(":")[0])
    return list(Path(found.origin).parent.glob("*.py")) if found is not None and found.origin else []


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


LENGTHS = ("train.epochs", "train.steps")
EXTENDED_ORIGIN = "extended from "


def length_of(train: Train) -> tuple[str, int]:
    """(the field that gives it, its value)"""
    return ("train.steps", train.steps) if train.steps else ("train.epochs", train.epochs or 1)


def resolve_added_length(old: RunSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a resumed run in which `+2` is the length that it makes."""
    key, length = length_of(old.train)
    found = dict(given)
    for name in LENGTHS:
        value = given.get(name)
        if not (isinstance(value, str) and value.startswith("+")):
            continue
        if not value[1:].isdecimal() or int(value) < 1:
            raise UserError(f"{name}={value}: this is not a number of {name[6:]} to add; type  {key}=+2")
        if name != key:
            raise UserError(f"{name}={value}: the length of this run is {key}={length}; add to that, as in  {key}=+2")
        found[name] = length + int(value)
    return found


@dataclass(frozen=True)
class Extension:
    key: str
    before: int
    now: int
    old: Train
    """As the run was planned last."""

    def __str__(self) -> str:
        return f"{self.key} is {self.now} instead of {self.before}"


def find_extension(run: RunDir, spec: RunSpec) -> Extension | None:
    """What a spec adds to the length of the run in a folder. It must not be shorter, nor count otherwise."""
    old = run.recorded_spec()
    (key, before), (new_key, now) = length_of(old.train), length_of(spec.train)
    entry = find_entry(spec.workload)
    if (key, before) == (new_key, now) or not (entry.batched or entry.extends):
        return None
    if key != new_key:
        raise UserError(
            f"{run.path} has {key}={before}, and {new_key}={now} counts otherwise; to go on for longer, add to what it "
            f"has, as in  {key}=+2"
        )
    if now < before:
        raise UserError(
            f"{run.path} has {key}={before} and cannot become shorter ({key}={now}); to go on for longer, add to it, "
            f"as in  {key}=+2"
        )
    return Extension(key, before, now, old.train)


def write_extension(run: RunDir, extension: Extension) -> None:
    """The run's own spec says the new length, and what it was before."""
    run.rewrite(run.recorded_spec().replace({extension.key: extension.now}, f"{EXTENDED_ORIGIN}{extension.before}"))


def parse_extended_from(origin: str) -> int:
    """The length that a run had before, by what its spec says of it; -1 where it was never made longer."""
    before = origin.removeprefix(EXTENDED_ORIGIN)
    return int(before) if origin != before and before.isdecimal() and len(before) < MOST_DIGITS else -1
