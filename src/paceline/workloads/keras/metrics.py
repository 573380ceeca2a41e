"""Metrics of Keras over samples that ranks share: what a metric has counted in each chunk is added up.

A metric of Keras keeps sums (of values and weights, of hits, a confusion matrix) and makes its result of them at the
end. Sums of chunks add up to those of all samples, so the result is exact on any number of ranks. Whether a metric is
of this kind is tried out on the first samples.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.errors import UserError, did_you_mean
from paceline.nn.keras_module import keras, on_device_of
from paceline.workloads.keras.losses import first_leaf
from paceline.workloads.keras.sections import KerasModel

BY_SHAPES = ("accuracy", "acc")
"""Names by which Keras means another metric for each kind of targets and outputs."""
WEIGHTED = "weighted_"


class SummedMetrics:
    """The metrics of a run, by name."""

    def __init__(self, given: Sequence[Any], weighted: Sequence[Any] = ()) -> None:
        with_weights = {f"{WEIGHTED}{name}": metric for name, metric in map(_metric, weighted)}
        self.all = dict(map(_metric, given)) | with_weights
        self.weighted = set(with_weights)
        self.tried = False

    @classmethod
    def of(cls, section: KerasModel, model: Any) -> SummedMetrics:
        """Those of the run file, else those of compile()."""
        if section.metrics or not model.compiled:
            return cls(section.metrics)
        return cls(*(_compiled(model, which) for which in ("_user_metrics", "_user_weighted_metrics")))

    def sums(self, output: Any, y: Any, weight: Tensor | None, without: Container[str]) -> dict[str, Tensor]:
        """What each metric, `without` some, has counted after these samples alone."""
        found: dict[str, Tensor] = {}
        with on_device_of(first_leaf(output)):
            for name in [name for name in self.all if name not in without]:
                if not self.tried:
                    self.all[name] = _of_shapes(self.all[name], output, y)
                    _refuse_unless_sums(name, self.all[name], output, y)
                metric = self.all[name]
                _update(metric, output, y, weight if name in self.weighted else None)
                found |= {_key(name, i): v.value.detach().double() for i, v in enumerate(metric.variables)}
        self.tried = True
        return found

    def results(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Each metric of all samples, from the sums over them."""
        found = {}
        with keras.device("cpu"):
            for name, metric in self.all.items():
                if _key(name, 0) in sums:
                    for i, variable in enumerate(metric.variables):
                        variable.value.data = torch.as_tensor(sums[_key(name, i)], dtype=variable.value.dtype)
                    result = np.asarray(metric.result())
                    found[name] = result if result.ndim else result.item()
        return found

    def among(self, sums: Mapping[str, Any]) -> set[str]:
        """Those of the sums that are of metrics."""
        return {key for key in sums if key.rpartition("[")[0] in self.all}


def _key(name: str, place: int) -> str:
    return f"{name}[{place}]"


def _compiled(model: Any, which: str) -> list[Any]:
    given = keras.tree.flatten(getattr(model._compile_metrics, which, None))
    return [one for one in given if one is not None]


def _metric(given: Any) -> tuple[str, Any]:
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


def _of_shapes(metric: Any, output: Any, y: Any) -> Any:
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
        variable.value.data = variable.value.data.to(first_leaf(output).device)
    metric.update_state(y, output, sample_weight=weight)


def _refuse_unless_sums(name: str, metric: Any, output: Any, y: Any) -> None:
    """One that keeps something else than sums would be wrong over several chunks."""
    half = len(first_leaf(output)) // 2
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
