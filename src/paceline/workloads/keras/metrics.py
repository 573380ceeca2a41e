"""Per-sample losses of a Keras model, and Keras metrics that are summed over ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.config.registry import load_user_function
from paceline.errors import UserError, did_you_mean
from paceline.nn.class_metrics import class_sums
from paceline.nn.keras_module import keras, use_device_of
from paceline.parallel.precision import to_at_least_fp32
from paceline.workloads.keras.sections import KerasModel

LOSS_KEY = "model.loss"
MEANS = ("sum_over_batch_size", "mean", "none", None)
"""Reductions that agree with a mean over the global batch."""
LEAST_PROBABILITY = 1e-7
NOT_COUNTED = -1


@dataclass(frozen=True)
class SampleLoss:
    """A loss of Keras, or a function of (y, output), before anything is summed up."""

    of: Any
    name: str

    def __call__(self, output: Any, y: Any, weight: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
        """(sum of the losses, how many there were): counted as Keras does, so that their ratio is the loss of fit()."""
        masks = [getattr(get_first_leaf(output), "_keras_mask", None)]
        output = tree_map(to_at_least_fp32, output)
        like = get_first_leaf(output)
        y = tree_map(lambda part: part.to(like.dtype), y)
        with use_device_of(like):
            each = self.of.call(y, output) if isinstance(self.of, keras.Loss) else self.of(*_match_ranks(y, output))
        if not isinstance(each, Tensor) or not each.ndim or len(each) != len(like):
            raise UserError(
                f"{LOSS_KEY}: {self.name} does not give a loss for each sample, as "
                "keras.losses.mean_squared_error does; "
                "leave out the mean over samples"
            )
        masks.append(getattr(each, "_keras_mask", None))
        if weight is not None:
            each = each * weight.to(each.dtype).view(-1, *[1] * (each.ndim - 1))
        if not (there := [mask for mask in masks if mask is not None]):
            return each.sum(), each.numel()
        counted = torch.stack([mask.to(each.dtype).expand_as(each) for mask in there]).prod(0)
        return (each * counted).sum(), counted.sum()

    @property
    def of_classes(self) -> bool:
        """One of the cross-entropies, whose outputs are scores of classes."""
        return isinstance(self.of, (keras.losses.BinaryCrossentropy, *self._several))

    @property
    def _several(self) -> tuple[type, ...]:
        return keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy

    def logits(self, output: Any) -> Tensor | None:
        """(…, classes), up to a constant for each row; None where outputs are not rows of scores."""
        if not self.of_classes or not isinstance(output, Tensor) or output.ndim < 2:
            return None
        output, raw = to_at_least_fp32(output), self.of.get_config()["from_logits"]
        if isinstance(self.of, self._several):
            return output if raw else output.clamp(min=LEAST_PROBABILITY).log()
        if output.shape[-1] != 1:  # several questions, each with yes or no
            return None
        odds = output if raw else torch.logit(output, eps=LEAST_PROBABILITY)
        return torch.cat([torch.zeros_like(odds), odds], -1)

    def class_sums(self, output: Any, y: Any) -> dict[str, Tensor]:
        """What accuracy and the like are made of; empty where outputs are not of classes."""
        logits = self.logits(output)
        if logits is None:
            return {}
        scores = isinstance(self.of, keras.losses.CategoricalCrossentropy)
        labels = y.argmax(-1) if scores else y.reshape(logits.shape[:-1]).double().round().long()
        mask = getattr(output, "_keras_mask", None)
        if mask is not None and mask.shape == labels.shape:
            labels = torch.where(mask.bool(), labels, NOT_COUNTED)
        return class_sums(logits.flatten(0, -2), labels.flatten())


def get_first_leaf(structure: Any) -> Tensor:
    return keras.tree.flatten(structure)[0]


def _match_ranks(y: Any, output: Any) -> tuple[Any, Any]:
    """As fit() hands them to a function: (n,) and (n, 1), taken as they are, would make n × n differences."""
    if not isinstance(y, Tensor) or not isinstance(output, Tensor):
        return y, output
    from keras.src.losses.loss import squeeze_or_expand_to_same_rank

    return squeeze_or_expand_to_same_rank(y, output)


def resolve_loss(section: KerasModel, model: Any) -> SampleLoss:
    """That of the run file, else that of compile()."""
    if ":" in section.loss:
        return SampleLoss(load_user_function(section.loss, LOSS_KEY), section.loss.rpartition(":")[2])
    if section.loss:
        return _find_loss(section.loss, section.from_logits)
    _reject_own_steps(type(model))
    given = model.loss if model.compiled else None
    if isinstance(given, dict | list | tuple) and len(given) == 1:
        given = next(iter(given.values() if isinstance(given, dict) else given))
    if not given:
        raise UserError(
            f"{LOSS_KEY} is not given, and the model is not compiled with one; write  "
            "model: {build: file.py:build, loss: mean_squared_error}  or call  model.compile(loss=…)"
        )
    if isinstance(given, dict | list | tuple) or model._compile_loss._user_loss_weights:
        raise UserError(
            f"{LOSS_KEY}: several losses, or loss_weights, of compile() are not carried over; write a function of "
            f"(y, outputs) that gives a loss per sample, and  {LOSS_KEY}=file.py:function"
        )
    return _find_loss(given, False) if isinstance(given, str) else _wrap_loss(given)


def _reject_own_steps(kind: type) -> None:
    """What a model computes there is not what its compiled loss says."""
    for name in ("train_step", "compute_loss"):
        if getattr(kind, name) is not getattr(keras.Model, name):
            raise UserError(
                f"{LOSS_KEY}: {kind.__name__} has its own {name}, which is not called here; "
                "write its loss as a function of "
                f"(y, outputs) that gives a loss per sample, and  {LOSS_KEY}=file.py:function"
            )


def _find_loss(name: str, from_logits: bool) -> SampleLoss:
    kinds = {_normalise_name(key): kind for key, kind in vars(keras.losses).items() if isinstance(kind, type)}
    if kind := kinds.get(_normalise_name(name)):
        return SampleLoss(kind(from_logits=True) if from_logits else kind(), name)
    try:
        return SampleLoss(keras.losses.get(name), name)
    except ValueError:
        known = sorted(key for key, value in vars(keras.losses).items() if callable(value) and key.islower())
        hint = did_you_mean(name, known) or "; use a name of keras.losses, or file.py:function"
        raise UserError(f"{LOSS_KEY}: there is no keras.losses.{name}{hint}") from None


def _normalise_name(name: str) -> str:
    """SparseCategoricalCrossentropy and sparse_categorical_crossentropy are one."""
    return name.replace("_", "").lower()


def _wrap_loss(given: Any) -> SampleLoss:
    if not isinstance(given, keras.Loss):
        return SampleLoss(given, getattr(given, "__name__", type(given).__name__))
    if given.reduction not in MEANS:
        raise UserError(
            f"{LOSS_KEY}: {given.name} has reduction={given.reduction!r}, and losses are "
            "averaged over the global batch "
            "here; leave reduction out"
        )
    return SampleLoss(given, given.name)


BY_SHAPES = ("accuracy", "acc")
"""Names by which Keras means another metric for each kind of targets and outputs."""
WEIGHTED = "weighted_"


class SummedMetrics:
    """The metrics of a run, by name."""

    def __init__(self, given: Sequence[Any], weighted: Sequence[Any] = ()) -> None:
        with_weights = {f"{WEIGHTED}{name}": metric for name, metric in map(_find_metric, weighted)}
        self.all = dict(map(_find_metric, given)) | with_weights
        self.weighted = set(with_weights)
        self.tried = False

    @classmethod
    def of(cls, section: KerasModel, model: Any) -> SummedMetrics:
        """Those of the run file, else those of compile()."""
        if section.metrics or not model.compiled:
            return cls(section.metrics)
        return cls(*(_list_compiled(model, which) for which in ("_user_metrics", "_user_weighted_metrics")))

    def sums(self, output: Any, y: Any, weight: Tensor | None, without: Container[str]) -> dict[str, Tensor]:
        """What each metric, `without` some, has counted after these samples alone."""
        found: dict[str, Tensor] = {}
        with use_device_of(get_first_leaf(output)):
            for name in [name for name in self.all if name not in without]:
                if not self.tried:
                    self.all[name] = _resolve_accuracy(self.all[name], output, y)
                    _check_keeps_sums(name, self.all[name], output, y)
                metric = self.all[name]
                _update(metric, output, y, weight if name in self.weighted else None)
                found |= {_sum_key(name, i): v.value.detach().double() for i, v in enumerate(metric.variables)}
        self.tried = True
        return found

    def results(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Each metric of all samples, from the sums over them."""
        found = {}
        with keras.device("cpu"):
            for name, metric in self.all.items():
                if _sum_key(name, 0) in sums:
                    for i, variable in enumerate(metric.variables):
                        variable.value.data = torch.as_tensor(sums[_sum_key(name, i)], dtype=variable.value.dtype)
                    result = np.asarray(metric.result())
                    found[name] = result if result.ndim else result.item()
        return found

    def among(self, sums: Mapping[str, Any]) -> set[str]:
        """Those of the sums that are of metrics."""
        return {key for key in sums if key.rpartition("[")[0] in self.all}


def _sum_key(name: str, place: int) -> str:
    return f"{name}[{place}]"


def _list_compiled(model: Any, which: str) -> list[Any]:
    given = keras.tree.flatten(getattr(model._compile_metrics, which, None))
    return [one for one in given if one is not None]


def _find_metric(given: Any) -> tuple[str, Any]:
    """With its name: as it was written, as in the history of fit()."""
    if isinstance(given, keras.Metric):
        return given.name, given
    if str(given).lower() in BY_SHAPES:
        return given, _Accuracy(name=given)
    try:
        found = keras.metrics.get(given)
    except ValueError:
        known = sorted(name for name, value in vars(keras.metrics).items() if callable(value) and name.islower())
        hint = did_you_mean(given, known) or "; use a name of keras.metrics"
        raise UserError(f"model.metrics: keras.metrics has no {given!r}{hint}") from None
    name = given if isinstance(given, str) else getattr(found, "__name__", type(found).__name__)
    if isinstance(found, keras.Metric):
        return name, found
    return name, keras.metrics.MeanMetricWrapper(found, name=name)


class _Accuracy(keras.metrics.BinaryAccuracy):
    """Of which kind is not known before there are outputs. All kinds keep the same sums."""


def _resolve_accuracy(metric: Any, output: Any, y: Any) -> Any:
    """As Keras chooses: two classes by one output, classes by number, or by a target for each of them."""
    if not isinstance(metric, _Accuracy):
        return metric
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        raise UserError(f"model.metrics: {metric.name!r} of which output? the model has several; leave it out")
    if output.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy(name=metric.name)
    by_number = y.ndim < output.ndim or y.shape[-1] == 1
    kind = keras.metrics.SparseCategoricalAccuracy if by_number else keras.metrics.CategoricalAccuracy
    return kind(name=metric.name)


def _update(metric: Any, output: Any, y: Any, weight: Tensor | None = None) -> None:
    metric.reset_state()
    for variable in metric.variables:  # they were made where the first of them was needed
        variable.value.data = variable.value.data.to(get_first_leaf(output).device)
    metric.update_state(y, output, sample_weight=weight)


def _check_keeps_sums(name: str, metric: Any, output: Any, y: Any) -> None:
    """One that keeps something else than sums would be wrong over several chunks."""
    half = len(get_first_leaf(output)) // 2
    if not half:
        return
    counted = []
    for part in (slice(None), slice(0, half), slice(half, None)):
        _update(metric, *(tree_map(lambda rows, part=part: rows[part], one) for one in (output, y)))
        counted.append([variable.value.detach().double().clone() for variable in metric.variables])
    for whole, first, second in zip(*counted, strict=True):
        if not torch.allclose(whole, first + second, rtol=1e-4, atol=1e-6):
            raise UserError(
                f"model.metrics: {name} does not keep sums, and cannot be put together from the parts that ranks "
                "evaluate; leave it out"
            )
