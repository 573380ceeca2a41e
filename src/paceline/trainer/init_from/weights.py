"""Open the weights of `model.init_from`: a safetensors file, the folder of a Hugging Face model, or a run."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.data.files import hash_value
from paceline.errors import Code, RunFailed, UserError, suggest_path
from paceline.io.files import check_regular, hash_file, read_text
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint import reader
from paceline.trainer.checkpoint.staging import read_safetensors
from paceline.workload import LogFn, ignore_log

KEY = "model.init_from"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def weights_error(path: Any, reason: str, code: Code = "invalid-data") -> UserError:
    return UserError(f"{KEY}={path}: {reason}", code=code, key=KEY)


def open_weights(path: Path, log: LogFn = ignore_log) -> "SafetensorsWeights | SavedWeights":
    """Open what `model.init_from` names; raise UserError if that is not possible."""
    if not path.exists():
        hint = suggest_path(path)
        if not path.parent.is_dir():  # the name of a model elsewhere
            hint = f"; fetch it first, as in  hf download {'/'.join(path.parts[-2:])} --local-dir {path.name}"
        raise weights_error(path, f"there is no such file or folder{hint}", "not-found")
    try:
        if not path.is_dir():
            return _open_files([path])
        if (path / reader.MANIFEST).is_file():
            try:
                checkpoint = reader.verify_checkpoint(path)
            except reader.DamagedCheckpoint as damage:
                raise weights_error(path, f"this checkpoint is not whole: {damage}", "damaged") from None
            return SavedWeights(checkpoint, reader.read_metadata(checkpoint), str(path))
        return _open_run(path, log) if (path / "spec.yaml").is_file() else _open_folder(path)
    except OSError as error:
        raise weights_error(path, f"cannot be read: {error.strerror or error}", "unreadable") from None


def _open_run(path: Path, log: LogFn) -> "SavedWeights":
    """Take the newest checkpoint of a run; log if another one was better."""
    run = RunDir.open(path)
    newest = reader.find_newest(run.checkpoints, log)
    if newest is None:
        resume = f"paceline train --resume {path}"
        raise weights_error(path, f"this run has no whole checkpoint; resume it by  {resume}", "not-found")
    best = reader.find_best_scored(run.checkpoints)
    if best is not None and best.step != newest.step and best.score != newest.score:
        log(f"weights: {path} was best at step {best.step}; to start there, type  {KEY}={best.path}")
    return SavedWeights(newest, reader.read_metadata(newest), f"step {newest.step} of {path}")


def read_model_type(path: Path) -> str:
    """Return the kind of model that the config.json of a folder names; "" if there is none."""
    try:
        return str(json.loads(read_text(path / "config.json")).get("model_type", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def _open_folder(path: Path) -> "SafetensorsWeights":
    """Open a folder with one safetensors file, or with several that an index names."""
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices and files != [path / SINGLE]:
        return _open_files(_read_index(path, indices[0]))
    if len(files) == 1:
        return _open_files(files)
    if not files and (pickled := [file for file in sorted(path.iterdir()) if file.suffix in PICKLED]):
        raise _reject_pickle(pickled[0])
    content = f"has {len(files)} .safetensors files; name one of them" if files else "has no .safetensors file"
    raise weights_error(path, f"this folder is not a run and {content}")


def _read_index(path: Path, index: Path) -> list[Path]:
    try:
        parts = sorted(set(map(Path, json.loads(read_text(index))["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise weights_error(path, f"{index.name} is not an index of safetensors files") from None
    if not parts:
        raise weights_error(path, f"{index.name} names no file")
    for part in parts:
        if part.name != str(part) or not (path / part).is_file():
            raise weights_error(path, f"{index.name} names {part}, which does not exist")
    return [path / part for part in parts]


def _reject_pickle(file: Path) -> UserError:
    line = f"safetensors.torch.save_file(state_dict, '{file.with_suffix('.safetensors').name}')"
    reason = f"this may be a pickle, which can run code; load it where you trust it and save it by  {line}"
    return weights_error(file, reason, "not-trusted")


def _open_files(files: list[Path]) -> "SafetensorsWeights":
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
            raise weights_error(file, f"this is not a whole safetensors file ({error})") from None
    if not shapes:
        raise weights_error(files[0], "there is no tensor in it")
    return SafetensorsWeights(tuple(files), shapes, where)


@dataclass(frozen=True)
class SafetensorsWeights:
    """Weights in one file, or in several that an index names."""

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    where: Mapping[str, Path]

    @property
    def words(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)

    def digest(self) -> str:
        """Return a hash of all files."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return hash_value(list(pool.map(hash_file, self.files)))

    def read(self, into: Mapping[str, Tensor]) -> None:
        from safetensors import SafetensorError

        try:
            read_safetensors(self.where, into)
        except (SafetensorError, OSError) as error:
            raise RunFailed(f"{KEY}={self.words} cannot be read: {error}", code="unreadable", key=KEY) from None


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a checkpoint of Paceline, on whatever ranks it was saved."""

    checkpoint: reader.Checkpoint
    metadata: Any
    words: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        names = reader.map_tensor_names(self.metadata)
        return {name: tuple(self.metadata.state_dict_metadata[saved].size) for name, saved in names.items()}

    def digest(self) -> str:
        return hash_file(self.checkpoint.path / reader.MANIFEST)  # it holds the checksum of every file

    def read(self, into: Mapping[str, Tensor]) -> None:
        names = reader.map_tensor_names(self.metadata)
        reader.read_into_tensors(self.checkpoint, {names[name]: tensor for name, tensor in into.items()}, self.metadata)


Weights = SafetensorsWeights | SavedWeights
