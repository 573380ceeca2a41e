"""Weights that lie somewhere, to begin a run with: a safetensors file, the folder of a Hugging Face model, or a run.

Names and shapes are known at once. Values are read tensor by tensor, and of each tensor the part that a rank holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.data.files import hash_value
from paceline.errors import RunFailed, UserError, did_you_mean
from paceline.io.files import hash_file
from paceline.io.safe_open import check_regular, read_text
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint import reader
from paceline.trainer.checkpoint.safetensors_file import locate_local_part
from paceline.workload import LogFn

KEY = "model.init_from"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Weights(Protocol):
    @property
    def words(self) -> str:
        """What they are, for people."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def digest(self) -> str:
        """A hash of the content."""

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, converted to their types; of a divided tensor what this rank holds."""


def open_weights(path: Path, say: LogFn = lambda line: None) -> Weights:
    """What `model.init_from` names; a UserError says in one line why it cannot be."""
    if not path.exists():
        if path.parent.is_dir():
            hint = did_you_mean(path.name, (one.name for one in path.parent.iterdir()))
        else:  # the name of a model elsewhere
            download = f"hf download {'/'.join(path.parts[-2:])} --local-dir {path.name}"
            hint = f"; nothing is downloaded, so fetch it first, as in  {download}"
        raise UserError(f"{KEY}={path}: there is no such file or folder{hint}")
    try:
        if not path.is_dir():
            return _open_files([path])
        if (path / reader.MANIFEST).is_file():
            return SavedWeights.of(path)
        if (path / "spec.yaml").is_file():
            return SavedWeights.of_run(path, say)
        return _open_folder(path)
    except OSError as error:
        raise UserError(f"{KEY}={path}: cannot be read: {error.strerror or error}") from None


def read_model_type(path: Path) -> str:
    """The kind of model that the config.json of a folder names; empty where there is none."""
    try:
        return str(json.loads(read_text(path / "config.json")).get("model_type", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def _open_folder(path: Path) -> Weights:
    indices = sorted(path.glob("*.safetensors.index.json"))
    if (path / SINGLE).is_file() or not indices:
        files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return _open_files(files)
        if not files and any(file.suffix in PICKLED for file in path.iterdir()):
            pickled = next(file for file in sorted(path.iterdir()) if file.suffix in PICKLED)
            raise _reject_pickle(pickled)
        found = f"has {len(files)} .safetensors files; name one of them" if files else "has no .safetensors file"
        raise UserError(f"{KEY}={path}: this folder is not a run and {found}")
    try:
        parts = set(map(Path, json.loads(read_text(indices[0]))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{KEY}={path}: {indices[0].name} is not an index of safetensors files") from None
    if not parts:
        raise UserError(f"{KEY}={path}: {indices[0].name} names no file")
    for part in sorted(parts):
        if part.name != str(part) or not (path / part).is_file():
            raise UserError(f"{KEY}={path}: {indices[0].name} names {part}, which is not there")
    return _open_files([path / part for part in sorted(parts)])


def _reject_pickle(file: Path) -> UserError:
    return UserError(
        f"{KEY}={file}: this may be a pickle, which can run code; load it where you trust it and save it by  "
        f"safetensors.torch.save_file(state_dict, '{file.with_suffix('.safetensors').name}')"
    )


def _open_files(files: list[Path]) -> SafetensorsWeights:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, Path] = {}
    for file in files:
        check_regular(file)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shapes[name], where[name] = tuple(opened.get_slice(name).get_shape()), file
        except SafetensorError as error:
            if file.suffix in PICKLED:
                raise _reject_pickle(file) from None
            raise UserError(f"{KEY}={file}: this is not a whole safetensors file ({error})") from None
    if not shapes:
        raise UserError(f"{KEY}={files[0]}: there is no tensor in it")
    return SafetensorsWeights(tuple(files), shapes, where)


@dataclass(frozen=True)
class SafetensorsWeights:
    """In one file, or in several that an index names."""

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    where: Mapping[str, Path]

    @property
    def words(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)

    def digest(self) -> str:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return hash_value(list(pool.map(hash_file, self.files)))

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """A file is opened for each tensor: what was read is then no longer mapped into this process."""
        from safetensors import SafetensorError, safe_open

        for name, tensor in into.items():
            try:
                with safe_open(self.where[name], framework="pt") as opened:
                    for local, place in locate_local_part(tensor):
                        local.copy_(opened.get_slice(name)[place] if place else opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise RunFailed(f"{KEY}={self.where[name]}: {name} cannot be read: {error}") from None


@dataclass(frozen=True)
class SavedWeights:
    """Of a checkpoint of ours, on whatever ranks it was saved."""

    checkpoint: reader.Checkpoint
    metadata: Any
    words: str

    @classmethod
    def of_run(cls, path: Path, say: LogFn) -> SavedWeights:
        """The newest of a run; where another one was better, that is said."""
        from paceline.trainer.checkpoint import dcp_files

        run = RunDir.open(path)
        newest = reader.find_newest(run.checkpoints, say)
        if newest is None:
            raise UserError(
                f"{KEY}={path}: this run has no whole checkpoint; go on with it by  paceline train --resume {path}"
            )
        best = reader.find_best_scored(run.checkpoints)
        if best is not None and best.step != newest.step and best.score != newest.score:
            say(f"weights: {path} was best at step {best.step}; to begin there, type  {KEY}={best.path}")
        return cls(newest, dcp_files.read_metadata(newest.path), f"step {newest.step} of {path}")

    @classmethod
    def of(cls, path: Path) -> SavedWeights:
        from paceline.trainer.checkpoint import dcp_files

        try:
            checkpoint = reader.verify_checkpoint(path)
        except reader.DamagedCheckpoint as damage:
            raise UserError(f"{KEY}={path}: this checkpoint is not whole: {damage}") from None
        return cls(checkpoint, dcp_files.read_metadata(path), str(path))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        described = self.metadata.state_dict_metadata
        return {name: tuple(described[there].size) for name, there in reader.map_tensor_names(self.metadata).items()}

    def digest(self) -> str:
        return hash_file(self.checkpoint.path / reader.MANIFEST)  # it holds the checksum of every file

    def read(self, into: Mapping[str, Tensor]) -> None:
        names = reader.map_tensor_names(self.metadata)
        reader.read_into_tensors(self.checkpoint, {names[name]: tensor for name, tensor in into.items()}, self.metadata)
