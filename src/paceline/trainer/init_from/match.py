"""Read the weights of `model.init_from` into a model that is spread over ranks, and report what fitted."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.data.corpora.tokenised import TOKENIZER
from paceline.errors import PacelineError, UserError, join_names
from paceline.launch.process_group import broadcast_from_main, gather_objects, raise_on_all
from paceline.parallel.parameters import is_sharded
from paceline.runlog.run_dir import RunDir
from paceline.trainer.agreement import agree_on_digest
from paceline.trainer.context import RunContext
from paceline.trainer.init_from.weights import KEY, Weights, open_weights, read_model_type, weights_error
from paceline.workload import LogFn, Workload


@dataclass(frozen=True)
class WeightMatch:
    """How the tensors of `model.init_from` and those of the model go together."""

    path: str
    words: str
    digest: str
    taken: int
    drawn: tuple[str, ...]  # of the model, drawn at random; with the shapes, where only those differ
    left: tuple[str, ...]  # of `model.init_from`, not used

    def sentence(self) -> str:
        parts = [f"weights: {self.taken} of {self.taken + len(self.drawn)} tensors from {self.words}"]
        parts += [f"drawn anew: {join_names(self.drawn)}"] * bool(self.drawn)
        parts += [f"left over: {join_names(self.left)}"] * bool(self.left)
        return "; ".join(parts)


@dataclass
class MatchPart:
    """The same for the tensors that one rank holds."""

    used: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    drawn: set[str] = field(default_factory=set)  # on purpose: no `model.init_from` has them
    missing: set[str] = field(default_factory=set)
    other_shape: dict[str, str] = field(default_factory=dict)


class WeightInitializer:
    """Reads `model.init_from` once, on every rank; `match` says afterwards what fitted."""

    def __init__(self, workload: Workload, context: RunContext) -> None:
        self.workload, self.context, self.path = workload, context, context.spec.init_from
        self.match: WeightMatch | None = None

    def gives_all(self, model: nn.Module | None) -> bool:
        """Return whether every rank has a model of which each tensor is in `model.init_from`."""
        part = MatchPart() if model is None else self._fit([model], self._weights[0].shapes)[1]
        return all(gather_objects(model is not None and not (part.drawn or part.missing or part.other_shape)))

    def __call__(self, parts: Sequence[nn.Module]) -> None:
        """Read into the modules that this rank holds; what is wrong on one rank is raised on all."""
        weights, digest = self._weights
        into, mine = self._fit(parts, weights.shapes)
        everyone = MatchPart()
        for part in gather_objects(mine):
            for name, values in vars(part).items():
                getattr(everyone, name).update(values)
        self.match = self._summarise_match(everyone, weights, digest)
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
        """The weights and their digest; UserError if nodes have others, or a run that starts once more began with."""
        path = self.path
        assert path is not None
        weights = broadcast_from_main(lambda: open_weights(path))
        digest = agree_on_digest(KEY, weights.digest, self.context.rank_info.local_rank)
        broadcast_from_main(lambda: self._check_first_weights(digest))
        return weights, digest

    def _check_first_weights(self, digest: str) -> None:
        run = RunDir(self.context.folder)
        began = run.start().get("weights")
        if began is not None and began["digest"] != digest:
            reason = f"what is in it has changed since {run.path} was started, without a checkpoint to resume from"
            raise weights_error(self.path, f"{reason}; bring it back, or start a new run", "conflict")

    def _fit(self, parts: Sequence[nn.Module], shapes: Mapping[str, Any]) -> tuple[dict[str, Tensor], MatchPart]:
        """Return (tensors of this rank by their names in `model.init_from`, how all of its tensors fit)."""
        mine, into = MatchPart(), {}
        for part in parts:
            shared = _find_tied_names(part)
            for name, tensor in self.workload.init_from_targets(part).items():
                if not hasattr(tensor, "shape"):
                    continue
                source = self.workload.init_from_name(name)
                if source is None:
                    mine.drawn.add(name)
                elif source not in shapes:
                    others = (self.workload.init_from_name(other) for other in shared.get(name, ()))
                    (mine.taken if any(other in shapes for other in others) else mine.missing).add(name)
                elif shapes[source] != tuple(tensor.shape):
                    mine.used.add(source)
                    mine.other_shape[name] = f"{list(shapes[source])} there and {list(tensor.shape)} in the model"
                else:
                    mine.used.add(source)
                    mine.taken.add(name)
                    into[source] = tensor
        return into, mine

    def _summarise_match(self, part: MatchPart, weights: Weights, digest: str) -> WeightMatch:
        left = sorted(weights.shapes.keys() - part.used)
        if not part.taken:
            raise weights_error(self.path, self._explain_no_fit(part, left), "conflict")
        if self.context.spec.model.match == "all":  # type: ignore[attr-defined]
            wrong = [f"{name} is {shapes}" for name, shapes in sorted(part.other_shape.items())][:1]
            wrong += [f"the model has {join_names(sorted(part.missing))}, which is not in it"] * bool(part.missing)
            wrong += [f"it has {join_names(left)}, which is not in the model"] * bool(left)
            if wrong:
                some = "take those that fit, and draw the others, with  model.match=some"
                raise weights_error(self.path, f"{', and '.join(wrong)}; {some}", "conflict")
        shapes = {name: f"{name} ({text})" for name, text in part.other_shape.items()}
        drawn = tuple(shapes.get(name, name) for name in sorted({*part.missing, *part.drawn, *part.other_shape}))
        return WeightMatch(str(self.path), weights.words, digest, len(part.taken), drawn, tuple(left))

    def _explain_no_fit(self, part: MatchPart, left: Sequence[str]) -> str:
        assert self.path is not None
        if kind := read_model_type(self.path):
            reason = f"its tensors have other names than those of {self.context.spec.workload}"
            return f"this is a Hugging Face model ({kind}), and {reason}; it is trained by  workload: transformers"
        ours = join_names(sorted({*part.missing, *part.other_shape}))
        return f"nothing in it fits the model, which has {ours}; it has {join_names(left) or 'other shapes'}"


def _find_tied_names(part: nn.Module) -> dict[str, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {name: several for several in names.values() if len(several) > 1 for name in several}
    return {**getattr(part, "tied_names", {}), **found}


def build_initializer(workload: Workload, context: RunContext) -> WeightInitializer | None:
    """Return None if the run draws its first weights, or resumes from a checkpoint."""
    return WeightInitializer(workload, context) if context.spec.init_from and context.checkpoint is None else None


def describe_match(start: WeightInitializer | None) -> dict[str, Any]:
    return {} if start is None or start.match is None else {"weights": asdict(start.match)}


def check_same_vocabulary(workload: Workload, start: Path, log: LogFn) -> None:
    """Raise UserError if the texts have other tokens than the weights were trained with: embeddings would be useless.

    With `model.match=some` it is logged only.
    """
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
    """Return the id of each token; None if the file is of another kind, which is reported elsewhere."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab())
    except Exception:  # the library raises nothing narrower
        return None
