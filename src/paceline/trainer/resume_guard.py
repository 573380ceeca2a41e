"""Check that a resumed run gives the same answer: same values, data and code, or a longer length."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import SCRIPT_OBJECT, RunSpec, Train
from paceline.config.registry import find_entry, get_user_module
from paceline.config.trust import KERAS, find_user_code
from paceline.data.files import hash_files
from paceline.errors import UserError
from paceline.runlog.run_dir import RunDir
from paceline.workload import BaseWorkload, LogFn

LENGTHS = ("train.epochs", "train.steps")
MAY_CHANGE = (
    "name",
    "parallel.",
    *(f"train.{word}" for word in ("keep", "log_every", "loggers", "patience", "checkpoint", "nonfinite", "on_oom")),
    *("train.evaluate_every", "train.evaluate_on"),
    *(f"data.{word}" for word in ("path", "test_path", "cache", "tokenizer", "workers", "memory", "arguments")),
)
"""Prefixes of keys that do not change the answer. Data and weights may move, not differ."""
MUST_STAY = ("parallel.reduce", "parallel.local_steps")
ANSWER_KEY = "answer"
EXTENDED = "extended from"  # begins the origin of a length that was made longer


def describe_answer(workload: BaseWorkload) -> dict[str, Any]:
    """Return what determines the answer, as values, so that a change can be named."""
    return {
        "spec": collect_determining_values(workload.spec),
        "length": length_of(workload.spec.train),
        "data": workload.fingerprint(),
        "code": hash_user_files(workload.spec),
    }


def hash_user_files(spec: RunSpec) -> dict[str, str]:
    """Return hashes of the user's files, by name."""
    return {name: hash_files([file]) for name, file in find_user_files(spec).items()}


def collect_determining_values(spec: RunSpec) -> dict[str, Any]:
    """Return the values that change the answer; of files the content counts."""
    values, determining = spec.dump(), {}
    for key, *_ in spec.fields():
        section, _, name = key.partition(".")
        is_place = name and name in (*getattr(spec, section).paths(), *getattr(spec, section).references)
        by_script = spec.origin(key) == SCRIPT_OBJECT
        if _is_fixed(key, spec) and not (is_place or by_script) and section not in ("workload", "cluster"):
            determining[key] = values[section][name] if name else values[section]
    return determining


def check_resume_request(run: RunDir, spec: RunSpec) -> None:
    """Raise UserError if a spec asks for what would change the answer of a run."""
    changes: list[tuple[str, Any, Any]] = [("workload", run.recorded_spec().workload, spec.workload)]
    if changes[0][1] == spec.workload:
        old = {key: value for key, value, _, _ in run.spec_like(spec).fields()}
        changes = [(key, old.get(key), value) for key, value, _, _ in spec.fields() if _is_fixed(key, spec)]
    for key, before, now in changes:
        if before != now:
            reason = f"{run.path} was started with {key}={before}, not {key}={now}"
            raise _conflict_error(key, f"{reason}; start a new run for that")
    find_extension(run, spec)


def check_same_answer(run: RunDir, workload: BaseWorkload, log: LogFn, changed_code: bool = False) -> None:
    """Raise UserError if values, data or code are not those of the newest checkpoint."""
    sealed, step = _read_newest_answer(run)
    data = sealed.get("data", run.start().get("data"))
    if data is not None and data != workload.fingerprint():
        raise _conflict_error("data.path", f"{run.path} was started on other data; bring them back, or start a new run")
    _check_same_length(run, sealed, step)
    check_same_values(run, workload.spec, sealed, step)
    now = hash_user_files(workload.spec)
    for name, file in find_user_files(workload.spec).items():
        if sealed.get("code", {}).get(name, digest := now[name]) == digest:
            continue
        if file.is_relative_to(run.path):  # the run's own copy, when what it began with is gone
            continue
        changed = f"{file} has changed since the checkpoint of step {step} was saved"
        if not changed_code:
            line = f"paceline train --resume {shlex.quote(str(run.path))} --changed-code"
            raise _conflict_error("workload", f"{changed}; bring it back, or resume with it as it is now:  {line}")
        log(f"{changed}; the run continues with it as it is now")


def _check_same_length(run: RunDir, sealed: Mapping[str, Any], step: int) -> None:
    """Raise UserError if the recorded length was edited instead of extended."""
    recorded = run.recorded_spec()
    key, now = length_of(recorded.train)
    before_key, before = sealed.get("length", [key, now])
    extended = before_key == key and before < now and recorded.origin(key).startswith(EXTENDED)
    if (before_key, before) != (key, now) and not extended:
        line = f"paceline train --resume {shlex.quote(str(run.path))} {before_key}=+2"
        saved = f"but the checkpoint of step {step} was made with {before_key}={before}; put it back"
        raise _conflict_error(key, f"{run.spec_file} says {key}={now}, {saved}; to train longer, type  {line}")


def check_same_values(run: RunDir, spec: RunSpec, sealed: Mapping[str, Any], step: int) -> None:
    """Raise UserError if a value of a spec is not the one that a checkpoint was made with."""
    now = collect_determining_values(spec)
    for key, before in sealed.get("spec", {}).items():
        if key in now and now[key] != before:
            anew = "start a new run"
            if spec.entry.batched:
                value = shlex.quote(f"{key}={'null' if now[key] is None else now[key]}")
                anew += f" with its weights:  paceline train --from {shlex.quote(str(run.path))} {value}"
            saved = f"but the checkpoint of step {step} was made with {key}={before}"
            raise _conflict_error(key, f"{run.spec_file} says {key}={now[key]}, {saved}; put it back, or {anew}")


def find_user_files(spec: RunSpec) -> dict[str, Path]:
    """Find the user's files that determine the answer, each by a name that it keeps if it moves."""
    found = find_user_code(spec.dump())
    modules = (Path(name if name.endswith(KERAS) else get_user_module(name)) for name in found)
    code = [module for module in modules if module.suffix in (".py", KERAS)]
    others = [*spec.model.determining_files(), *spec.data.determining_files()]
    files: dict[str, Path] = {}
    for file in dict.fromkeys(file for file in (*code, *others) if file.is_file()):
        again = sum(other.name == file.name for other in files.values())
        files[f"{file.name} ({again + 1})" if again else file.name] = file
    return files


def _conflict_error(key: str, reason: str) -> UserError:
    return UserError(reason, code="conflict", key=key)


def _is_fixed(key: str, spec: RunSpec) -> bool:
    """Return whether a value cannot change once a run has started."""
    batched, extends = spec.entry.batched, spec.entry.extends
    may_change = MAY_CHANGE + ("model.init_from",) * batched + LENGTHS * (batched or extends)
    return key in MUST_STAY or not key.startswith(may_change)


def _read_newest_answer(run: RunDir) -> tuple[Mapping[str, Any], int]:
    """Return what the newest checkpoint says of its answer, and its step."""
    from paceline.trainer.checkpoint.reader import DamagedCheckpoint, list_sealed, verify_checkpoint

    for path in list_sealed(run.checkpoints):
        with suppress(DamagedCheckpoint):
            checkpoint = verify_checkpoint(path, checksums=False)
            return checkpoint.meta.get(ANSWER_KEY, {}), checkpoint.step
    return {}, 0


def length_of(train: Train) -> tuple[str, int]:
    return ("train.steps", train.steps) if train.steps else ("train.epochs", train.epochs or 1)


def resolve_added_length(old: RunSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a resumed run with `+2` added to its length."""
    (key, length), overrides = length_of(old.train), dict(given)
    for name in LENGTHS:
        value = given.get(name)
        if not (isinstance(value, str) and value.startswith("+")):
            continue
        if name != key or not value[1:].isdecimal() or int(value) < 1:
            reason = f"{name}={value} cannot be added: the length of this run is {key}={length}; type  {key}=+2"
            raise UserError(reason, code="invalid-value", key=name)
        overrides[name] = length + int(value)
    return overrides


def find_extension(run: RunDir, spec: RunSpec) -> tuple[str, int, int, Train] | None:
    """Return (key, length before, now, old `train`) of a longer run; raise UserError for a shorter one."""
    old = run.recorded_spec()
    (key, before), (new_key, now) = length_of(old.train), length_of(spec.train)
    entry = find_entry(spec.workload)
    if (key, before) == (new_key, now) or not (entry.batched or entry.extends):
        return None
    if key != new_key or now < before:
        reason = f"{run.path} has {key}={before} and cannot become {new_key}={now}; to train longer, type  {key}=+2"
        raise _conflict_error(new_key, reason)
    return key, before, now, old.train
