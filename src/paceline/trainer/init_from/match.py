"""Read `model.init_from` into a model that is spread over ranks already, and report which tensors matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from paceline.errors import PacelineError, UserError, join_names
from paceline.launch.process_group import broadcast_from_main, gather_objects, raise_on_all
from paceline.parallel.parameters import is_sharded
from paceline.runlog.run_dir import RunDir
from paceline.trainer.context import RunContext
from paceline.trainer.init_from.weights import KEY, Weights, open_weights, read_model_type
from paceline.workload import Workload


@dataclass(frozen=True)
class WeightMatch:
    """How the tensors of `model.init_from` and those of the model go together."""

    path: str
    words: str
    digest: str
    taken: int
    drawn: tuple[str, ...]
    """Of the model, and begin as they were drawn; with the shapes, where only those differ."""
    left: tuple[str, ...]
    """Of `model.init_from`, and are in no use."""

    def sentence(self) -> str:
        said = [f"weights: {self.taken} of {self.taken + len(self.drawn)} tensors from {self.words}"]
        said += [f"drawn anew: {join_names(self.drawn)}"] * bool(self.drawn)
        said += [f"left over: {join_names(self.left)}"] * bool(self.left)
        return "; ".join(said)


@dataclass
class MatchPart:
    """The same for the tensors that one rank holds."""

    used: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    drawn: set[str] = field(default_factory=set)
    """On purpose: they are in no `model.init_from`."""
    missing: set[str] = field(default_factory=set)
    other_shape: dict[str, str] = field(default_factory=dict)

    def add(self, other: MatchPart) -> None:
        for name, found in vars(other).items():
            getattr(self, name).update(found)


class WeightInitializer:
    """Reads `model.init_from`, once, on every rank; `match` says afterwards what fitted."""

    def __init__(self, workload: Workload, context: RunContext) -> None:
        self.workload, self.context = workload, context
        self.match: WeightMatch | None = None

    def gives_all(self, model: nn.Module | None) -> bool:
        """Whether every rank has a model of which each tensor is in `model.init_from`."""
        shapes, mine = self._weights[0].shapes, False
        if model is not None:
            part = self._fit([model], shapes)[1]
            mine = not (part.drawn or part.missing or part.other_shape)
        return all(gather_objects(mine))

    def __call__(self, parts: Sequence[nn.Module]) -> None:
        """Into the modules that this rank holds. Whatever is wrong on one rank is raised on all of them."""
        weights, digest = self._weights
        into, mine = self._fit(parts, weights.shapes)
        everyone = MatchPart()
        for part in gather_objects(mine):
            everyone.add(part)
        self.match = self._matched(everyone, weights, digest)
        wrong: PacelineError | None = None
        try:
            weights.read(into)
            _reject_nan(into, self._path)
        except PacelineError as error:
            wrong = error
        raise_on_all(wrong)

    @cached_property
    def _weights(self) -> tuple[Weights, str]:
        """The weights and a hash of them, as the main rank finds them."""
        return broadcast_from_main(self._opened)

    def _opened(self) -> tuple[Weights, str]:
        """What a run began with must still be there if it begins once more."""
        weights, run = open_weights(self._path), RunDir(self.context.folder)
        digest = weights.digest()
        began = run.start().get("weights")
        if began is not None and began["digest"] != digest:
            raise UserError(
                f"{run.path} began with other weights: what is in {KEY}={self._path} has changed since, and there is "
                "no checkpoint to go on from; bring it back, or start a new run"
            )
        return weights, digest

    @property
    def _path(self) -> Any:
        return self.context.spec.init_from

    def _fit(
        self, parts: Sequence[nn.Module], there: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Tensor], MatchPart]:
        """(tensors of this rank by their names in `model.init_from`, how all of its tensors fit)"""
        mine, into = MatchPart(), {}
        for part in parts:
            shared = _find_tied_names(part)
            for name, tensor in part.state_dict().items():
                if not isinstance(tensor, Tensor):
                    continue
                source = self.workload.init_from_name(name)
                if source is None:
                    mine.drawn.add(name)
                elif source not in there:
                    others = (self.workload.init_from_name(other) for other in shared.get(name, ()))
                    (mine.taken if any(other in there for other in others) else mine.missing).add(name)
                elif there[source] != tuple(tensor.shape):
                    mine.used.add(source)
                    mine.other_shape[name] = f"{list(there[source])} there and {list(tensor.shape)} in the model"
                else:
                    mine.used.add(source)
                    mine.taken.add(name)
                    into[source] = tensor
        return into, mine

    def _matched(self, part: MatchPart, weights: Weights, digest: str) -> WeightMatch:
        left = sorted(weights.shapes.keys() - part.used)
        given, some = f"{KEY}={self._path}", "take those that fit, and draw the others, with  model.match=some"
        if not part.taken:
            raise UserError(f"{given}: {self._nothing_fits(part, left)}")
        if self.context.spec.model.match == "all":  # type: ignore[attr-defined]
            for name, said in sorted(part.other_shape.items()):
                raise UserError(f"{given}: {name} is {said}; {some}")
            wrong = [f"the model has {join_names(sorted(part.missing))}, which is not in it"] * bool(part.missing)
            wrong += [f"it has {join_names(left)}, which is not in the model"] * bool(left)
            if wrong:
                raise UserError(f"{given}: {', and '.join(wrong)}; {some}")
        shapes = {name: f"{name} ({said})" for name, said in part.other_shape.items()}
        drawn = sorted({*part.missing, *part.drawn, *part.other_shape})
        return WeightMatch(
            str(self._path), weights.words, digest, len(part.taken), tuple(shapes.get(n, n) for n in drawn), tuple(left)
        )

    def _nothing_fits(self, part: MatchPart, left: Sequence[str]) -> str:
        if kind := read_model_type(self._path):
            return (
                f"this is a Hugging Face model ({kind}), and its tensors have other names than those of "
                f"{self.context.spec.workload}; it is trained by  workload: transformers"
            )
        here = sorted({*part.missing, *part.other_shape})
        there = join_names(left) if left else "other shapes"
        return f"nothing in it fits the model, which has {join_names(here)}; it has {there}"


def _reject_nan(read: Mapping[str, Tensor], path: Any) -> None:
    """A damaged file, or a run that diverged: its first loss would be no number either."""
    for name, tensor in read.items():
        local = tensor.to_local() if is_sharded(tensor) else tensor
        if bool(local.isnan().any()):
            raise UserError(f"{KEY}={path}: {name} has values that are not numbers (nan), so nothing can begin with it")


def _find_tied_names(part: nn.Module) -> dict[str, list[str]]:
    """All names of a parameter that has several, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: several for several in names.values() if len(several) > 1 for name in several}


def build_initializer(workload: Workload, context: RunContext) -> WeightInitializer | None:
    """None where the run begins with weights that are drawn, or goes on from a checkpoint."""
    return (
        WeightInitializer(workload, context)
        if context.spec.init_from is not None and context.checkpoint is None
        else None
    )


def describe_match(start: WeightInitializer | None) -> dict[str, Any]:
    """For the "start" event."""
    return {} if start is None or start.match is None else {"weights": asdict(start.match)}
