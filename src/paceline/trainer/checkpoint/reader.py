"""Find, verify and read checkpoints; damaged ones are skipped."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.files import compute_seal, hash_file
from paceline.io.safe_open import read_text
from paceline.io.terminal import warn
from paceline.launch.process_group import raise_on_all
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.staging import flatten_state
from paceline.workload import LogFn

CHECKPOINT_FORMAT = 1
MANIFEST = "manifest.json"
EMA_PREFIX = "ema."
"""How names of averaged weights begin, which else have those of the model."""
_SEALED_NAME = re.compile(r"step-\d{8,}(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint: its folder, its step, and what was said about it when it was saved."""

    path: Path
    step: int
    meta: dict[str, Any]
    score: float | None


def find_newest(folder: Path, say: LogFn) -> Checkpoint | None:
    """The newest whole checkpoint; each one that is not whole is named, with the reason, and skipped."""
    return _first_whole(folder, list_sealed(folder), say)


def find_best(folder: Path, say: LogFn) -> Checkpoint | None:
    """The whole checkpoint with the highest score (the newest of equals); without scores, the newest."""
    return _first_whole(folder, sorted(list_sealed(folder), key=_score, reverse=True), say)


def find_best_scored(folder: Path) -> Checkpoint | None:
    """The one with the highest score, its checksums not computed; None where none has a score."""
    for path in sorted(list_sealed(folder), key=_score, reverse=True):
        with suppress(DamagedCheckpoint):
            return found if (found := verify_checkpoint(path, checksums=False)).score is not None else None
    return None


def find_checkpoint(run: RunDir, which: str) -> Checkpoint:
    """The newest or the best of a run, which must have one."""
    found = {"newest": find_newest, "best": find_best}[which](run.checkpoints, warn)
    if found is None:
        raise UserError(f"{run.path} has no whole checkpoint; go on with  paceline train --resume {run.path}")
    return found


def _first_whole(folder: Path, paths: Iterable[Path], say: LogFn) -> Checkpoint | None:
    for leftover in sorted(folder.glob(".step-*.writing")):
        say(f"checkpoint {leftover} is skipped: it was not finished")
    for path in paths:
        try:
            return verify_checkpoint(path)
        except DamagedCheckpoint as damage:
            say(f"checkpoint {path} is skipped: {damage}")
    return None


class DamagedCheckpoint(Exception):
    """Why a folder is not a whole checkpoint, as the end of a sentence."""


def list_sealed(folder: Path) -> list[Path]:
    """Folders with the name of a sealed checkpoint, newest first; one that is being replaced after its successor."""
    named = [path for path in folder.glob("step-*") if _SEALED_NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (-parse_step(path), path.suffix == ".old"))


def parse_step(path: Path) -> int:
    return int(path.name[5:].removesuffix(".old"))


def _score(path: Path) -> float:
    try:
        score = _manifest(path)["score"]
    except DamagedCheckpoint:
        score = None
    return -math.inf if score is None else score


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(read_text(path / MANIFEST))
        version = manifest["format"]
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read: {why}") from None
    if version != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(
            f"it is of format {version}, and this version of Paceline reads format {CHECKPOINT_FORMAT}"
        )
    if manifest.pop("seal", None) != compute_seal(manifest):
        raise DamagedCheckpoint(f"its {MANIFEST} is damaged (it differs from its checksum)")
    if not _is_manifest(manifest):
        raise DamagedCheckpoint(f"its {MANIFEST} is not one that was written here")
    return manifest


def _is_manifest(manifest: dict[str, Any]) -> bool:
    """Whether its values are of their kinds; a checksum can be right because somebody made it so."""
    files, score = manifest.get("files"), manifest.get("score", "")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(manifest.get("meta"), dict)
        and (score is None or isinstance(score, int | float))
        and isinstance(files, dict)
        and all(Path(name).name == name and "\0" not in name for name in files)
        and all(isinstance(facts, list) and [type(fact) for fact in facts] == [int, str] for facts in files.values())
    )


def verify_checkpoint(path: Path, checksums: bool = True) -> Checkpoint:
    """The checkpoint in a folder, of which every file is there, has its size and, if asked, its checksum."""
    manifest = _manifest(path)
    if manifest["step"] != parse_step(path):
        raise DamagedCheckpoint(f"its {MANIFEST} is of step {manifest['step']}")
    files = {path / name: (size, sha256) for name, (size, sha256) in manifest["files"].items()}
    try:
        for file, (size, _) in files.items():
            if (found := file.stat().st_size) != size:
                raise DamagedCheckpoint(f"its file {file.name} has {found} bytes instead of {size}")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for file, sha256 in zip(files, pool.map(hash_file, files) if checksums else (), strict=False):
                if sha256 != files[file][1]:
                    raise DamagedCheckpoint(f"its file {file.name} is damaged (it differs from its checksum)")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"its file {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(
            f"its file {Path(error.filename or '').name} cannot be read: {error.strerror}"
        ) from None
    return Checkpoint(path, manifest["step"], manifest["meta"], manifest["score"])


def restore_checkpoint(checkpoint: Checkpoint, state: dict[str, Any], partly: bool = False) -> None:
    """Load in place into the tensors of a state, on every rank and on any number of ranks.

    The state may leave out whole entries (`{"model": …}` alone); within an entry, names, shapes and types must agree.
    `partly`: it may lack names, which other ranks have.
    """
    from paceline.trainer.checkpoint import dcp_files

    wrong: PacelineError | None = None
    try:
        flat = flatten_state(state)
        metadata = dcp_files.read_metadata(checkpoint.path)
        _check_fit(checkpoint.path, metadata.state_dict_metadata, flat, partly)
        read_into_tensors(checkpoint, flat, metadata)
    except PacelineError as error:
        wrong = error
    except OSError as error:
        wrong = RunFailed(f"checkpoint {checkpoint.path} cannot be read: {error}")
    raise_on_all(wrong)


def read_tensors(checkpoint: Checkpoint, prefix: str = "model.") -> dict[str, Tensor]:
    """All tensors whose names begin with the prefix, whole and on the CPU, under their names without it."""
    from paceline.trainer.checkpoint import dcp_files

    metadata = dcp_files.read_metadata(checkpoint.path)
    described: dict[str, Any] = metadata.state_dict_metadata
    names = map_tensor_names(metadata, prefix)
    tensors = {
        name: torch.empty(described[name].size, dtype=described[name].properties.dtype) for name in names.values()
    }
    read_into_tensors(checkpoint, tensors, metadata)
    return {name: tensors[there] for name, there in sorted(names.items())}


def map_tensor_names(metadata: Any, prefix: str = "model.") -> dict[str, str]:
    """The names of all tensors that begin with the prefix, by what they are without it.

    Those of the model are the ones to use: where a run averages its weights (`train.ema`), the averages.
    """
    described = metadata.state_dict_metadata
    names = {name.removeprefix(prefix): name for name in described if name.startswith(prefix)}
    if prefix == "model.":
        names |= {name.removeprefix(EMA_PREFIX): name for name in described if name.startswith(EMA_PREFIX)}
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
        raise RunFailed(f"checkpoint {path} cannot be read: {describe_failure_cause(error)}") from error


def _check_fit(path: Path, there: Mapping[str, Any], here: Mapping[str, Tensor], partly: bool) -> None:
    entries = set() if partly else {name.split(".")[0] for name in here}
    for name in [*here, *(name for name in there if name not in here and name.split(".")[0] in entries)]:
        one = (list(there[name].size), there[name].properties.dtype) if name in there else None
        other = (list(here[name].shape), here[name].dtype) if name in here else None
        if one != other:
            types_differ = one and other and one[1] != other[1]
            said = [
                "missing" if it is None else f"{it[0]} of {it[1]}".replace("torch.", "") if types_differ else str(it[0])
                for it in (one, other)
            ]
            what = "is of another model" if name.startswith("model.") else "does not fit this run"
            raise UserError(f"{path}: this checkpoint {what}: {name} is {said[0]} there and {said[1]} here")


def find_first_failure(failure: Any) -> tuple[int, BaseException]:
    """The lowest rank that failed, and its error."""
    rank = min(failure.failures)
    return rank, failure.failures[rank][0]


def describe_failure_cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


EXTRA_KEY = "kept"
"""Their entry in a checkpoint."""


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def collect_extra_tensors(kept: Mapping[str, Stateful]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in _iterate_leaves(kept) if isinstance(leaf, Tensor)}


def collect_extra_values(kept: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: leaf for name, leaf in _iterate_leaves(kept) if not isinstance(leaf, Tensor)}


def restore_extra(checkpoint: Checkpoint, kept: Mapping[str, Stateful]) -> None:
    """Give each object the state that it had when the checkpoint was saved."""
    if not kept:
        return
    if EXTRA_KEY not in checkpoint.meta:
        raise UserError(f"{checkpoint.path} was saved by a script that kept nothing; leave run.keep out, or begin anew")
    values: dict[str, Any] = dict(checkpoint.meta[EXTRA_KEY])
    if tensors := {name: leaf.clone() for name, leaf in collect_extra_tensors(kept).items()}:
        restore_checkpoint(checkpoint, {EXTRA_KEY: tensors})
    for name, thing in kept.items():
        leaves, form = tree_flatten_with_path(thing.state_dict())
        names = [_name_leaf(name, path) for path, _ in leaves]
        if missing := [leaf for leaf in names if leaf not in tensors and leaf not in values]:
            raise UserError(f"{checkpoint.path} does not hold {missing[0]}, which run.keep(…) asks for")
        found = [tensors[leaf] if leaf in tensors else values[leaf] for leaf in names]
        thing.load_state_dict(tree_unflatten(found, form))


def _iterate_leaves(kept: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    for name, thing in kept.items():
        for path, leaf in tree_flatten_with_path(thing.state_dict())[0]:
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                raise UserError(
                    f"run.keep: {_name_leaf(name, path)} is {type(leaf).__name__}; a checkpoint "
                    "holds tensors and numbers"
                )
            yield _name_leaf(name, path), leaf


def _name_leaf(name: str, path: Any) -> str:
    return f"{name}{keystr(path)}"
