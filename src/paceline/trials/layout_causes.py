"""Why an answer depends on the layout: the model and its data are tried out, in this process, until a cause shows.

A few samples are taken through the loss at once and in two parts. Without a cause both give the same sums. With one, it
is found by leaving out what is suspected: a cause is named only where the sums come apart with it and agree without.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from paceline.config import RunSpec
from paceline.data.order import Order
from paceline.data.prefetch import move_batch
from paceline.data.samples import load_training_samples, preserve_generators
from paceline.errors import join_names
from paceline.layout import Layout
from paceline.nn.keras_backend import is_keras, unwrap_keras
from paceline.nn.keyed_dropout import KeyedPasses
from paceline.parallel.batch_layers import convert_batch_layers
from paceline.workload import Samples, Workload, build_workload

SAMPLES = 12
CLOSE = 1e-4  # fp32 rounding is 100 times smaller
TORCHS = "torch's generator"
SEEDED: dict[str, Callable[[int], Any]] = {
    TORCHS: torch.manual_seed,
    "numpy's": np.random.seed,
    "Python's random": random.seed,
}


MESSAGES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class LayoutCause(StrEnum):
    WEIGHTS = "weights"
    DATA = "data"
    BATCH_STATISTICS = "batch statistics"
    SYNCHRONISED_STATISTICS = "synchronised statistics"
    DROPOUT = "dropout"
    OWN_DRAWS = "own draws"
    MEAN = "mean"
    COUNT = "count"
    SHARED = "shared"


@dataclass(frozen=True)
class FoundCause:
    cause: LayoutCause
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(MESSAGES[self.cause].format(names=join_names(self.names)))


@dataclass(frozen=True)
class LossResult:
    total: float
    count: float
    samples: int


class ModuleCall(NamedTuple):
    name: str
    given: list[Tensor]
    found: list[Tensor]


@preserve_generators()
def find_layout_causes(spec: RunSpec) -> list[FoundCause]:
    """Find what makes the answer depend on the layout, as far as one process shows it."""
    workload = build_workload(spec)
    if not isinstance(workload, Workload):
        return []
    workload.prepare(lambda text: None)
    seed_all_generators(0)
    samples = load_training_samples(workload)
    order = replace(Order.of(spec.train, samples), batch=min(SAMPLES, len(samples)), growth=())
    whole = order.global_batch(0)
    first, second = (dict(build_seeded_model(workload, spec).named_parameters()) for _ in range(2))
    other = tuple(name for name in first if not torch.equal(first[name], second[name]))
    found = [FoundCause(LayoutCause.WEIGHTS, other)] if other else []
    found += [] if _same_samples(spec, samples, whole.ids, whole.keys) else [FoundCause(LayoutCause.DATA)]
    if found or len(whole.ids) < 3:
        return found
    model, group = build_seeded_model(workload, spec), len(whole.ids) // 3
    if isinstance(spec.train.batchnorm_group, int) or spec.train.batchnorm_group == "auto":
        spec = spec.replace({"train.batchnorm_group": max(2, group)})
    convert_batch_layers(model, spec, Layout("single", 1, len(whole.ids), len(whole.ids)), torch.device("cpu"))
    return SplitExperiment(workload, model, samples, whole.ids[: 3 * group], whole.keys[: 3 * group]).causes()


def seed_all_generators(seed: int, *others: str) -> None:
    for name, seeds in SEEDED.items():
        seeds(seed + (name in others))


def build_seeded_model(workload: Workload, spec: RunSpec) -> nn.Module:
    seed_all_generators(spec.train.seed)
    model: nn.Module = workload.model()
    if workload.draws_by_name:
        cast(Any, model).initialise(spec.train.seed)
    return model.to(torch.float64 if spec.train.precision == "fp64" else torch.float32).train()


def _same_samples(spec: RunSpec, samples: Samples, ids: np.ndarray, keys: np.ndarray) -> bool:
    """Return whether the data has the same samples when it is built again."""
    again = build_workload(spec)
    again.prepare(lambda text: None)
    seed_all_generators(1)
    batches = [tree_leaves(some.batch(ids, keys)) for some in (samples, load_training_samples(again))]
    return all(_is_equal(a, b) for a, b in zip(*batches, strict=True))


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


def _is_equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return np.array_equal(a, b)
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=CLOSE, equal_nan=True))


@dataclass
class SplitExperiment:
    """A model and a few samples, whose loss is taken at once and in parts."""

    workload: Workload
    model: nn.Module
    samples: Samples
    ids: np.ndarray
    keys: np.ndarray

    def __post_init__(self) -> None:
        modules = list(self.model.named_modules())
        of_keras = _list_keras_layers(self.model)
        self.statistics = [(n, m) for n, m in modules if isinstance(m, _NormBase) or hasattr(m, "running_mean")]
        self.statistics += [(n, m) for n, m in of_keras if hasattr(m, "moving_mean")]
        self.dropout = [(n, m) for n, m in modules if isinstance(m, _DropoutNd) and m.p > 0]
        self.dropout += [(n, m) for n, m in of_keras if hasattr(m, "seed_generator") or hasattr(m, "generator")]
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.passes = KeyedPasses([self.model])
        cut = len(self.ids) * 2 // 3  # parts of different size: equal ones would hide some mistakes
        self.parts = (slice(0, cut), slice(cut, None))

    def causes(self) -> list[FoundCause]:
        with _evaluation_mode([*self.statistics, *self.dropout]):
            rest = self._own_draws() or self._loss()
        return self._statistics(apart_without=bool(rest)) + self._find_dropout_cause(draws_without=bool(rest)) + rest

    def loss(self, part: slice = slice(None), *others: str) -> LossResult:
        """Compute the loss from the same generators and buffers each time; `others` get another seed."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        batch = self.samples.batch(self.ids[part], self.keys[part])
        batch = move_batch(batch, "cpu", self.workload.spec.train.precision)
        seed_all_generators(0, *others)
        with self.passes.running(torch.from_numpy(self.keys[part])):
            total, count = self.workload.loss(self.model, batch)
        return LossResult(float(total.detach()), float(count), len(self.ids[part]))

    def apart(self) -> bool:
        """Return whether the mean loss changes if samples are taken in parts."""
        whole, parts = self.loss(), [self.loss(part) for part in self.parts]
        total, count = sum(part.total for part in parts), sum(part.count for part in parts)
        return not _is_close(whole.total / max(whole.count, 1), total / max(count, 1))

    def _statistics(self, apart_without: bool) -> list[FoundCause]:
        """Return norms that change the loss, or whose buffers differ: a norm of single samples keeps statistics too."""
        if not self.statistics:
            return []
        with _evaluation_mode(self.dropout):
            kept = [self._run_and_copy_buffers(part) for part in (slice(None), self.parts[0])]
            apart = (name for name in kept[0] if not _is_equal(kept[0][name], kept[1][name]))
            moved = {name.replace("/", ".").rpartition(".")[0] for name in apart}
            every = not apart_without and self.apart()
        found = [(name, module) for name, module in self.statistics if every or name in moved]
        synchronised = [(name, module) for name, module in found if isinstance(module, nn.SyncBatchNorm)]
        others = [pair for pair in found if pair not in synchronised]
        kinds = {LayoutCause.SYNCHRONISED_STATISTICS: synchronised, LayoutCause.BATCH_STATISTICS: others}
        return [FoundCause(kind, _describe_modules(modules)) for kind, modules in kinds.items() if modules]

    def _run_and_copy_buffers(self, part: slice) -> dict[str, Tensor]:
        self.loss(part)
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _find_dropout_cause(self, draws_without: bool) -> list[FoundCause]:
        if not self.dropout or draws_without:
            return []
        with _evaluation_mode(self.statistics):
            draws = self._draws_from(TORCHS)
        return [FoundCause(LayoutCause.DROPOUT, _describe_modules(self.dropout))] if draws else []

    def _draws_from(self, generator: str) -> bool:
        return not _is_close(self.loss().total, self.loss(slice(None), generator).total)

    def _own_draws(self) -> list[FoundCause]:
        found = []
        for generator in filter(self._draws_from, SEEDED):
            where = _find_first_difference(self._calls(slice(None)), self._calls(slice(None), generator))
            found.append(f"{where or 'loss()'} draws from {generator}")
        return [FoundCause(LayoutCause.OWN_DRAWS, tuple(found))] if found else []

    def _loss(self) -> list[FoundCause]:
        """Return the cause if losses differ without randomness: a mean, a wrong count, or samples that are mixed."""
        if not self.apart():
            return []
        whole, parts = self.loss(), [self.loss(part) for part in self.parts]
        for weights in ([part.samples for part in parts], [part.count for part in parts]):
            mean = sum(w * part.total for w, part in zip(weights, parts, strict=True)) / max(sum(weights), 1)
            if _is_close(mean, whole.total):
                of_parts = " and ".join(f"{part.total:.4g} for {part.samples} of them" for part in parts)
                losses = f"the loss was {whole.total:.4g} for {whole.samples} samples, and {of_parts}"
                return [FoundCause(LayoutCause.MEAN, (losses,))]
        if _is_close(sum(part.total for part in parts), whole.total):
            counts = " and ".join(f"{p.count:g} for {p.samples}" for p in (whole, *parts))
            return [FoundCause(LayoutCause.COUNT, (counts,))]
        mixing = _find_first_difference(self._calls(slice(None)), self._calls(self.parts[0]))
        return [FoundCause(LayoutCause.SHARED, (mixing or "loss()",))]

    def _calls(self, part: slice, *others: str) -> list[ModuleCall]:
        """Return every call of a module during a loss, inner ones first."""
        calls: list[ModuleCall] = []
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():

                def note(module: nn.Module, given: Any, found: Any, name: str = name) -> None:
                    leaves = (tree_leaves(one) for one in (given, found))
                    calls.append(ModuleCall(name, *([x.detach() for x in s if isinstance(x, Tensor)] for s in leaves)))

                hooks.enter_context(module.register_forward_hook(note))
            self.loss(part, *others)
        return calls


def _find_first_difference(whole: Sequence[ModuleCall], part: Sequence[ModuleCall]) -> str:
    """Return the first module with another output for the same input; `part` may be its first rows."""
    for ours, theirs in zip(whole, part, strict=False):
        pairs = [
            [_is_equal(a[: len(b)] if a.ndim and b.ndim else a, b) for a, b in zip(some, others, strict=False)]
            for some, others in ((ours.given, theirs.given), (ours.found, theirs.found))
        ]
        if ours.name == theirs.name and pairs[0] and all(pairs[0]) and not all(pairs[1]):
            return ours.name or "the model's forward()"
    return ""


def _describe_modules(modules: Sequence[tuple[str, nn.Module]]) -> tuple[str, ...]:
    return tuple(f"{name} ({type(module).__name__})" for name, module in modules)


def _list_keras_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return layers of Keras models that behave differently in training; `named_modules` lacks them."""
    found: dict[int, Any] = {}
    for module in model.modules():
        original = unwrap_keras(module)
        if is_keras(original):
            found |= {id(layer): layer for layer in original._flatten_layers(include_self=False)}
    return [(layer.name, layer) for layer in found.values() if layer._call_has_training_arg]


@contextmanager
def _evaluation_mode(modules: Sequence[tuple[str, Any]]) -> Iterator[None]:
    with ExitStack() as restored:
        for _, module in modules:
            if is_keras(module):
                restored.enter_context(_inference_call(module))
            else:
                module.eval()
                restored.callback(module.train)
        yield


@contextmanager
def _inference_call(layer: Any) -> Iterator[None]:
    """Call a layer of Keras, which gets `training` with each call, as in inference while entered."""
    own = vars(layer).get("call")
    layer.call = lambda *given, **named: type(layer).call(layer, *given, **{**named, "training": False})
    yield
    if own is None:
        del layer.__dict__["call"]
    else:
        layer.call = own
