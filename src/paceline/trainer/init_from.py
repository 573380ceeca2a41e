"""Weights to begin with (`model.init_from`): a safetensors file, a Hugging Face folder or a run."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data.corpora.tokenised import TOKENIZER
from paceline.errors import Code, PacelineError, RunFailed, UserError, join_names, reject_value, suggest_path
from paceline.io.files import check_regular, hash_file, hash_value, read_text
from paceline.launch.process_group import broadcast_from_main, gather_objects, raise_on_all
from paceline.parallel.parameters import is_sharded
from paceline.runlog.run_dir import RunDir
from paceline.trainer.agreement import agree_on_digest
from paceline.trainer.checkpoint import reader
from paceline.trainer.checkpoint.staging import read_safetensors
from paceline.workload import LogFn, Workload

if TYPE_CHECKING:
    from paceline.trainer.context import RunContext

KEY = "model.init_from"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def weights_error(path: Any, reason: str, code: Code = "invalid-data") -> UserError:
    return reject_value(KEY, path, reason, code)


def open_weights(path: Path) -> "SafetensorsWeights | SavedWeights":
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
        if (path / "spec.yaml").is_file():
            newest = reader.find_checkpoint(RunDir.open(path), "newest")
            return SavedWeights(newest, reader.read_metadata(newest), f"step {newest.step} of {path}")
        return _open_folder(path)
    except OSError as error:
        raise weights_error(path, f"cannot be read: {error.strerror or error}", "unreadable") from None


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
        files = sorted({path / Path(part).name for part in json.loads(read_text(index))["weight_map"].values()})
        missing = [file.name for file in files if not file.is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise weights_error(path, f"{index.name} is not an index of safetensors files") from None
    if missing or not files:
        raise weights_error(path, f"{index.name} names {''.join(missing[:1]) or 'no file'}, which does not exist")
    return files


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
    words: str = ""

    @classmethod
    def of(cls, checkpoint: reader.Checkpoint) -> "SavedWeights":
        return cls(checkpoint, reader.read_metadata(checkpoint))

    @cached_property
    def names(self) -> Mapping[str, str]:
        return reader.map_tensor_names(self.metadata)

    @cached_property
    def like(self) -> Mapping[str, Tensor]:
        """Return tensors of the same shapes and types without memory."""
        there = self.metadata.state_dict_metadata
        each = ((name, there[self.names[name]]) for name in sorted(self.names))
        return {name: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for name, one in each}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.like.items()}

    def digest(self) -> str:
        return hash_file(self.checkpoint.path / reader.MANIFEST)  # it holds the checksum of every file

    def read(self, into: Mapping[str, Tensor]) -> None:
        found = {self.names[name]: tensor for name, tensor in into.items()}
        reader.read_into_tensors(self.checkpoint, found, self.metadata)

    def get(self, name: str) -> Tensor:
        """Return one tensor, whole."""
        found = torch.empty_like(self.like[name], device="cpu")
        self.read({name: found})
        return found


Weights = SafetensorsWeights | SavedWeights


@dataclass(frozen=True)
class WeightMatch:
    """How the tensors of `model.init_from` and those of the model go together."""

    path: str
    words: str
    digest: str
    taken: int
    drawn: tuple[str, ...]  # of the model, with the shapes where only those differ
    left: tuple[str, ...]  # of `model.init_from`, not used

    def sentence(self) -> str:
        parts = [f"weights: {self.taken} of {self.taken + len(self.drawn)} tensors from {self.words}"]
        parts += [f"drawn anew: {join_names(self.drawn)}"] * bool(self.drawn)
        parts += [f"left over: {join_names(self.left)}"] * bool(self.left)
        return "; ".join(parts)


FITS, DRAWN, MISSING = "", "no file has it", "not there"
"""Of a tensor of the model; a fourth are the shapes, if only those differ."""


class WeightInitializer:
    """Reads `model.init_from` once, on every rank; `match` says afterwards what fitted."""

    def __init__(self, workload: Workload, context: "RunContext") -> None:
        self.workload, self.context, self.path = workload, context, context.spec.init_from
        self.match: WeightMatch | None = None

    def gives_all(self, model: nn.Module | None) -> bool:
        """Return whether every rank has a model of which each tensor is in `model.init_from`."""
        fits = model is not None and not any(self._fit([model], self._weights[0].shapes)[1].values())
        return all(gather_objects(fits))

    def __call__(self, parts: Sequence[nn.Module]) -> None:
        """Read into this rank's modules; what is wrong on one rank is raised on all."""
        weights, digest = self._weights
        into, mine = self._fit(parts, weights.shapes)
        found: dict[str, str] = {}
        for name, why in ((name, why) for rank in gather_objects(mine) for name, why in rank.items()):
            found[name] = found.get(name) or why
        self.match = self._summarise_match(found, weights, digest)
        wrong: PacelineError | None = None
        try:
            weights.read(into)
            for name, tensor in into.items():
                if bool((tensor.to_local() if is_sharded(tensor) else tensor).isnan().any()):
                    raise weights_error(self.path, f"{name} has values that are not numbers (nan)")
        except PacelineError as error:
            wrong = error
        raise_on_all(wrong)

    @cached_property
    def _weights(self) -> tuple[Weights, str]:
        """Return the weights and their digest, compared over all ranks; raise UserError if nodes have others."""
        path = self.path
        assert path is not None
        weights = broadcast_from_main(lambda: open_weights(path))
        return weights, agree_on_digest(KEY, weights.digest, self.context.rank_info.local_rank)

    def _fit(self, parts: Sequence[nn.Module], shapes: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (tensors of this rank by their names in the file, how each of its tensors fits)."""
        into, found = {}, {}
        for part in parts:
            shared = _find_tied_names(part)
            for name, tensor in self.workload.init_from_targets(part).items():
                if not hasattr(tensor, "shape"):
                    continue
                source = self.workload.init_from_name(name)
                found[name] = DRAWN if source is None else FITS
                if source is None:
                    continue
                if (there := shapes.get(source)) == tuple(tensor.shape):
                    into[source] = tensor
                elif there is not None:
                    found[name] = f"{list(there)} there and {list(tensor.shape)} in the model"
                else:
                    others = map(self.workload.init_from_name, shared.get(name, ()))
                    found[name] = FITS if any(other in shapes for other in others) else MISSING
        return into, found

    def _summarise_match(self, found: Mapping[str, str], weights: Weights, digest: str) -> WeightMatch:
        fits = [name for name, why in found.items() if why == FITS]
        missing = sorted(name for name, why in found.items() if why == MISSING)
        other = {name: why for name, why in sorted(found.items()) if why not in (FITS, DRAWN, MISSING)}
        left = sorted(weights.shapes.keys() - set(map(self.workload.init_from_name, found)))
        if not fits:
            raise weights_error(self.path, self._explain_no_fit(sorted([*missing, *other]), left), "conflict")
        if self.context.spec.model.match == "all":  # type: ignore[attr-defined]
            wrong = [f"{name} is {shapes}" for name, shapes in other.items()][:1]
            wrong += [f"the model has {join_names(missing)}, which is not in it"] * bool(missing)
            wrong += [f"it has {join_names(left)}, which is not in the model"] * bool(left)
            if wrong:
                some = "take those that fit, and draw the others, with  model.match=some"
                raise weights_error(self.path, f"{', and '.join(wrong)}; {some}", "conflict")
        drawn = [f"{name} ({other[name]})" if name in other else name for name, why in sorted(found.items()) if why]
        return WeightMatch(str(self.path), weights.words, digest, len(fits), tuple(drawn), tuple(left))

    def _explain_no_fit(self, ours: Sequence[str], left: Sequence[str]) -> str:
        assert self.path is not None
        if kind := read_model_type(self.path):
            reason = f"its tensors have other names than those of {self.context.spec.workload}"
            return f"this is a Hugging Face model ({kind}), and {reason}; it is trained by  workload: transformers"
        theirs = join_names(left) or "other shapes"
        return f"nothing in it fits the model, which has {join_names(ours)}; it has {theirs}"


def _find_tied_names(part: nn.Module) -> dict[str, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {name: several for several in names.values() if len(several) > 1 for name in several}
    return {**getattr(part, "tied_names", {}), **found}


def build_initializer(workload: Workload, context: "RunContext") -> WeightInitializer | None:
    """Return None if the run draws its first weights, or resumes from a checkpoint."""
    return WeightInitializer(workload, context) if context.spec.init_from and context.checkpoint is None else None


def check_same_vocabulary(workload: Workload, start: Path, log: LogFn) -> None:
    """Raise UserError if texts have other tokens than the weights; with `match=some` log it."""
    theirs = find_tokenizer(start)
    if theirs is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        workload.keep(Path(folder))
        ours = _read_tokens(Path(folder) / TOKENIZER)
    if ours is None or _read_tokens(theirs) in (None, ours):
        return
    wrong = f"{KEY}={start} was trained with another vocabulary than these texts have"
    if workload.spec.model.match == "all":  # type: ignore[attr-defined]
        reason = f"{wrong}; tokenise them with its own, by  data.tokenizer={theirs}"
        raise UserError(reason, code="conflict", key="data.tokenizer")
    log(f"weights: {wrong}; its own is  data.tokenizer={theirs}")


def find_tokenizer(start: Path) -> Path | None:
    """Find the tokenizer of a run, of one of its checkpoints, or of a folder with a model."""
    places = (start / "kept", start.parent.parent / "kept", start)
    return next((place / TOKENIZER for place in places if start.is_dir() and (place / TOKENIZER).is_file()), None)


def _read_tokens(file: Path) -> dict[str, Any] | None:
    """Return the id of each token; None if the file is of another kind."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab())
    except Exception:  # the library raises nothing narrower
        return None
