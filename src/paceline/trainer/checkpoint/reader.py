"""Find, verify and read checkpoints; damaged ones are skipped."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.files import hash_file, hash_value, read_text
from paceline.io.terminal import warn
from paceline.launch.process_group import raise_on_all
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.staging import flatten_state
from paceline.workload import LogFn

CHECKPOINT_FORMAT = 1
MANIFEST = "manifest.json"
EMA_ENTRY = "ema"
GROUP_KEY = "batchnorm_group"
EXTRA_KEY = "kept"
_SEALED_NAME = re.compile(r"step-\d{8,}(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint and what its manifest says."""

    path: Path
    step: int
    meta: dict[str, Any]
    score: float | None


class DamagedCheckpoint(Exception):
    """Why a folder is not a whole checkpoint, as the end of a sentence."""


def find_newest(folder: Path, log: LogFn) -> Checkpoint | None:
    """Return the newest whole checkpoint; log each that is skipped, with the reason."""
    return _find_whole(folder, list_sealed(folder), log)


def find_best(folder: Path, log: LogFn) -> Checkpoint | None:
    """Return the whole checkpoint with the highest score (the newest of equals); without scores, the newest."""
    return _find_whole(folder, sorted(list_sealed(folder), key=_read_score, reverse=True), log)


def find_checkpoint(run: RunDir, which: str) -> Checkpoint:
    """Return the newest or the best of a run, which must have one."""
    if (checkpoint := (find_best if which == "best" else find_newest)(run.checkpoints, warn)) is None:
        reason = f"{run.path} has no whole checkpoint; continue with  paceline train --resume {run.path}"
        raise UserError(reason, code="not-found")
    return checkpoint


def _find_whole(folder: Path, paths: Iterable[Path], log: LogFn) -> Checkpoint | None:
    for leftover in sorted(folder.glob(".step-*.writing")):
        log(f"checkpoint {leftover} is skipped: it was not finished")
    for path in paths:
        try:
            return verify_checkpoint(path)
        except DamagedCheckpoint as damage:
            log(f"checkpoint {path} is skipped: {damage}")
    return None


def list_sealed(folder: Path) -> list[Path]:
    """List folders with the name of a sealed checkpoint, newest first; a replaced one after its successor."""
    named = [path for path in folder.glob("step-*") if _SEALED_NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (-parse_step(path), path.suffix == ".old"))


def parse_step(path: Path) -> int:
    return int(path.name[5:].removesuffix(".old"))


def _read_score(path: Path) -> float:
    try:
        score = _read_manifest(path).get("score")
    except DamagedCheckpoint:
        score = None
    return score if isinstance(score, float) else -math.inf


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(read_text(path / MANIFEST))
        version = manifest["format"]
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read: {reason}") from None
    if version != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(f"it is of format {version}, and Paceline reads format {CHECKPOINT_FORMAT}")
    if manifest.pop("seal", None) != hash_value(manifest):
        raise DamagedCheckpoint(f"its {MANIFEST} is damaged (it differs from its checksum)")
    return manifest


def verify_checkpoint(path: Path, checksums: bool = True) -> Checkpoint:
    """Read the checkpoint of a folder; raise DamagedCheckpoint if a file is missing or has changed."""
    manifest = _read_manifest(path)
    try:
        if manifest["step"] != parse_step(path):
            raise DamagedCheckpoint(f"its {MANIFEST} is of step {manifest['step']}")
        files = {path / Path(name).name: (size, sha256) for name, (size, sha256) in manifest["files"].items()}
        for file, (size, _) in files.items():
            if (found := file.stat().st_size) != size:
                raise DamagedCheckpoint(f"its file {file.name} has {found} bytes instead of {size}")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            sums = zip(files, pool.map(hash_file, files), strict=True) if checksums else ()
        if damaged := next((file for file, sha256 in sums if sha256 != files[file][1]), None):
            raise DamagedCheckpoint(f"its file {damaged.name} is damaged (it differs from its checksum)")
        return Checkpoint(path, manifest["step"], manifest["meta"], manifest["score"])
    except OSError as error:
        wrong = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise DamagedCheckpoint(f"its file {Path(error.filename or '').name} {wrong}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpoint(f"its {MANIFEST} was not written by Paceline") from None


def restore_checkpoint(checkpoint: Checkpoint, state: dict[str, Any], partly: bool = False) -> None:
    """Load a state in place; it may leave out whole entries and, `partly`, names that other ranks have."""
    wrong: PacelineError | None = None
    try:
        flat, metadata = flatten_state(state), read_metadata(checkpoint)
        _check_fit(checkpoint.path, metadata.state_dict_metadata, flat, partly)
        read_into_tensors(checkpoint, flat, metadata)
    except PacelineError as error:
        wrong = error
    except OSError as error:
        wrong = RunFailed(f"checkpoint {checkpoint.path} cannot be read: {error}", code="unreadable")
    raise_on_all(wrong)


def read_metadata(checkpoint: Checkpoint) -> Any:
    """Read the names, shapes and places of all tensors, by DCP, which takes seconds to import."""
    from paceline.trainer.checkpoint import dcp_files

    return dcp_files.read_metadata(checkpoint.path)


def read_tensors(checkpoint: Checkpoint, prefix: str = "model.") -> dict[str, Tensor]:
    """Return tensors whose names begin with the prefix, on the CPU, by their names without it."""
    metadata = read_metadata(checkpoint)
    names, there = map_tensor_names(metadata, prefix), metadata.state_dict_metadata
    tensors = {saved: torch.empty(there[saved].size, dtype=there[saved].properties.dtype) for saved in names.values()}
    read_into_tensors(checkpoint, tensors, metadata)
    return {name: tensors[saved] for name, saved in sorted(names.items())}


def map_tensor_names(metadata: Any, prefix: str = "model.") -> dict[str, str]:
    """Map names without the prefix to those in the checkpoint; averages replace the model's."""
    names: dict[str, str] = {}
    for begin in (prefix, f"{EMA_ENTRY}.") if prefix == "model." else (prefix,):
        there = (name for name in metadata.state_dict_metadata if name.startswith(begin))
        names |= {name.removeprefix(begin): name for name in there}
    return names


def read_into_tensors(checkpoint: Checkpoint, into: dict[str, Tensor], metadata: Any) -> None:
    """Fill tensors in place, on one rank; of a divided tensor what that rank holds."""
    from paceline.trainer.checkpoint import dcp_files

    path = checkpoint.path
    try:
        dcp_files.read_dcp(path, metadata, into)
    except dcp_files.CheckpointException as failure:
        _, error = find_first_failure(failure)
        if isinstance(error, UnpicklingError):
            raise dcp_files.reject_metadata(path, error) from None
        reason = f"checkpoint {path} cannot be read: {describe_failure_cause(error)}"
        raise RunFailed(reason, code="unreadable") from error


def _check_fit(path: Path, there: Mapping[str, Any], here: Mapping[str, Tensor], partly: bool) -> None:
    entries = set() if partly else {name.split(".")[0] for name in here}
    for name in [*here, *(name for name in there if name not in here and name.split(".")[0] in entries)]:
        saved = f"{list(there[name].size)} of {there[name].properties.dtype}" if name in there else "missing"
        own = f"{list(here[name].shape)} of {here[name].dtype}" if name in here else "missing"
        if saved != own:
            fit = "is of another model" if name.startswith("model.") else "does not fit this run"
            reason = f"{path}: this checkpoint {fit}: {name} is {saved} there and {own} here".replace("torch.", "")
            raise UserError(reason, code="conflict", key=name)


def find_first_failure(failure: Any) -> tuple[int, BaseException]:
    rank = min(failure.failures)
    return rank, failure.failures[rank][0]


def describe_failure_cause(error: BaseException) -> str:
    """Return the reason of an error that DCP or the file system raised, for a message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


class Stateful(Protocol):
    """What a script may keep in checkpoints beside model and optimiser."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def collect_extra(extra: Mapping[str, Stateful], tensors: bool) -> dict[str, Any]:
    """Return the tensors, or the plain values, in the state of a script's objects, by name."""
    return {name: leaf for name, leaf in _iterate_leaves(extra) if isinstance(leaf, Tensor) == tensors}


def restore_extra(checkpoint: Checkpoint, extra: Mapping[str, Stateful]) -> None:
    """Load into each object of a script the state that it had when the checkpoint was saved."""
    if not extra:
        return
    values: dict[str, Any] = dict(checkpoint.meta.get(EXTRA_KEY, {}))
    tensors = {name: leaf.clone() for name, leaf in collect_extra(extra, tensors=True).items()}
    if EXTRA_KEY in checkpoint.meta and tensors:
        restore_checkpoint(checkpoint, {EXTRA_KEY: tensors})
        values |= tensors
    for name, thing in extra.items():
        leaves, form = tree_flatten_with_path(thing.state_dict())
        names = [f"{name}{keystr(path)}" for path, _ in leaves]
        if missing := [leaf for leaf in names if leaf not in values]:
            reason = f"{checkpoint.path} does not hold {missing[0]}, which run.keep(…) asks for"
            raise UserError(reason, code="conflict", key="run.keep")
        thing.load_state_dict(tree_unflatten([values[leaf] for leaf in names], form))


def _iterate_leaves(extra: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    for name, thing in extra.items():
        for path, leaf in tree_flatten_with_path(thing.state_dict())[0]:
            leaf_name = f"{name}{keystr(path)}"
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                reason = f"run.keep: {leaf_name} is {type(leaf).__name__}; a checkpoint holds tensors and numbers"
                raise UserError(reason, code="not-supported", key="run.keep")
            yield leaf_name, leaf
