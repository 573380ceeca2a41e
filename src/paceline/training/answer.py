"""What determines the answer of a run: values of its spec, its data, its code.

It is sealed with every checkpoint, and compared before the run goes on: an answer does not change without a word.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.record.run_dir import RunDir
from paceline.registry import entry_of, own_place
from paceline.spec import RunSpec
from paceline.training.extension import LENGTHS, extended_from, extension_of, length_of
from paceline.trusting import code_of
from paceline.workload import BaseWorkload, Say

MAY_CHANGE = (
    "name",
    "parallel.",
    *(f"train.{word}" for word in ("keep", "log_every", "loggers", "patience", "checkpoint", "nonfinite", "on_oom")),
    *("train.evaluate_every", "train.evaluate_on"),
    *(f"data.{word}" for word in ("path", "test_path", "cache", "tokenizer", "workers", "memory", "arguments")),
)
"""What a resumed run may be given anew: nothing that would change its answer. Data and weights may move, not differ."""
MUST_STAY = ("parallel.reduce", "parallel.local_steps")
SEALED = "answer"
"""Its entry in a checkpoint."""


def answer_of(workload: BaseWorkload) -> dict[str, Any]:
    """As a checkpoint keeps it: the values themselves, so that a change can be named."""
    return {
        "spec": determining(workload.spec),
        "length": length_of(workload.spec.train),
        "data": workload.fingerprint(),
        "code": {name: _digest([file]) for name, file in own_files(workload.spec).items()},
        "workload": _digest(sorted(package_of(workload.spec))),
    }


def determining(spec: RunSpec) -> dict[str, Any]:
    """The values that change the answer, as JSON. Of files and folders it is the content that counts, not the place.

    What a script's own objects decide (its optimiser's learning rate) is in its code.
    """
    values, found = spec.dump(), {}
    for key, *_ in spec.fields():
        section, _, name = key.partition(".")
        at_a_place = name and name in (*getattr(spec, section).paths(), *getattr(spec, section).references)
        by_script = spec.origin(key).startswith("the script's")
        if _fixed(key, spec) and not (at_a_place or by_script) and section not in ("workload", "cluster"):
            found[key] = values[section][name] if name else values[section]
    return found


def same_request(run: RunDir, spec: RunSpec) -> None:
    """A run goes on as it began: whatever is asked for that would change its answer is refused by name."""
    if (before := run.recorded_spec().workload) != spec.workload:
        raise _another_answer(run, "workload", before, spec.workload)
    old = {key: value for key, value, _, _ in run.spec_like(spec).fields()}
    for key, value, _, _ in spec.fields():
        if old.get(key) != value and _fixed(key, spec):
            raise _another_answer(run, key, old.get(key), value)
    extension_of(run, spec)


def same_answer(run: RunDir, workload: BaseWorkload, say: Say, changed_code: bool = False) -> None:
    """What the newest checkpoint of a run was made with is what there is now, or a UserError says what is not."""
    sealed, step = _sealed(run)
    began = sealed.get("data", run.start().get("data"))
    if began is not None and began != workload.fingerprint():
        raise UserError(
            f"{run.path} was begun on other data: what data.path or the installed packages hold has changed since; "
            "bring it back, or start a new run"
        )
    _same_length(run, sealed, step)
    if (changed := changed_value(run, workload.spec, sealed, step)) is not None:
        said, key, value = changed
        raise UserError(f"{said} or, if it is meant, {_begin_another(run, workload, key, value)}")
    for name, file in own_files(workload.spec).items():
        if sealed.get("code", {}).get(name, digest := _digest([file])) == digest:
            continue
        told = f"{file} has changed since the checkpoint of step {step} was saved"
        if not changed_code:
            raise UserError(
                f"{told}; bring it back, or go on with it as it is now:  "
                f"paceline train --resume {shlex.quote(str(run.path))} --changed-code"
            )
        say(f"{told}; the run goes on with it as it is now")
    if sealed.get("workload", digest := _digest(sorted(package_of(workload.spec)))) != digest:
        say(f"the code of {workload.spec.workload} is another version than at step {step}; results may differ slightly")


def _same_length(run: RunDir, sealed: Mapping[str, Any], step: int) -> None:
    """A run is made longer by a word that is typed, which its spec says from then on."""
    spec = run.recorded_spec()
    key, now = length_of(spec.train)
    before = sealed.get("length", [key, now])
    if before != [key, now] and not (before[0] == key and extended_from(spec.origin(key)) >= before[1]):
        longer = f"paceline train --resume {shlex.quote(str(run.path))} {before[0]}=+2"
        raise UserError(
            f"{run.spec_file} says {key}={now}, but the checkpoint of step {step} was made with "
            f"{before[0]}={before[1]}; put it back and, to go on for longer, add to it:  {longer}"
        )


def changed_value(run: RunDir, spec: RunSpec, sealed: Mapping[str, Any], step: int) -> tuple[str, str, Any] | None:
    """(what is wrong, the key, its value) where a spec is not the one that a checkpoint was made with."""
    now = determining(spec)
    for key, before in sealed.get("spec", {}).items():
        if key in now and now[key] != before:
            said = (
                f"{run.spec_file} says {key}={now[key]}, but the checkpoint of step {step} was made with {key}={before}"
            )
            return f"{said}; put it back", key, now[key]
    return None


def own_files(spec: RunSpec) -> dict[str, Path]:
    """The files of the user's own that a spec names, code and run files, each by a name that it keeps if it moves."""
    code = [place for reference in code_of(spec.dump()) if (place := Path(own_place(reference))).suffix == ".py"]
    sections = (spec.model, spec.data)
    listed = [Path(file) for section in sections for key in section.run_files for file in getattr(section, key)]
    found: dict[str, Path] = {}
    for file in dict.fromkeys(file for file in (*code, *listed) if file.is_file()):
        again = sum(other.name == file.name for other in found.values())
        found[f"{file.name} ({again + 1})" if again else file.name] = file
    return found


def _fixed(key: str, spec: RunSpec) -> bool:
    """Whether a value is for good, once a run has begun."""
    entry = spec.entry
    may_change = MAY_CHANGE + ("model.start",) * entry.batched + LENGTHS * (entry.batched or entry.extends)
    return key in MUST_STAY or not key.startswith(may_change)


def _sealed(run: RunDir) -> tuple[Mapping[str, Any], int]:
    """What the newest checkpoint says of its answer, and its step; its tensors are verified where they are read."""
    from paceline.training.checkpoints.saved import DamagedCheckpoint, sealed_in, verified

    for path in sealed_in(run.checkpoints):
        with suppress(DamagedCheckpoint):
            checkpoint = verified(path, checksums=False)
            return sealed_in_meta(checkpoint.meta), checkpoint.step
    return {}, 0


def sealed_in_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its answer, as far as it is of the kind that `answer_of` makes."""
    found = meta.get(SEALED)
    whole = isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in ("spec", "code"))
    return found if isinstance(found, dict) and whole and _is_length(found.get("length", ["", 0])) else {}


def _is_length(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [str, int]


def _begin_another(run: RunDir, workload: BaseWorkload, key: str, value: Any) -> str:
    if not workload.spec.entry.batched:
        return "start a new run"
    given = shlex.quote(f"{key}={'null' if value is None else value}")
    return f"begin another run with its weights:  paceline train --from {shlex.quote(str(run.path))} {given}"


def _another_answer(run: RunDir, key: str, before: Any, now: Any) -> UserError:
    return UserError(
        f"{run.path} was begun with {key}={before} and cannot go on with {key}={now}; "
        "leave it as it was, or start a new run"
    )


def package_of(spec: RunSpec) -> list[Path]:
    """The files of a workload that comes with Paceline or with an installed package."""
    if own_place(spec.workload):
        return []
    found = find_spec(entry_of(spec.workload).run.partition(":")[0])
    return list(Path(found.origin).parent.glob("*.py")) if found is not None and found.origin else []


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
