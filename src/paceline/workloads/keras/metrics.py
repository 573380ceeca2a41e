"""Metrics of Keras over samples that ranks share: what a metric has counted in each chunk is added up.

A metric of Keras keeps sums (of values and weights, of hits, a confusion matrix) and makes its result of them at the
end. Sums of chunks add up to those of all samples, so the result is exact on any number of ranks. Whether a metric is
of this kind is tried out on the first samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.errors import UserError, did_you_mean
from paceline.nn.keras_module import keras, on_device_of
from paceline.workloads.keras.losses import SampleLoss, first_leaf
from paceline.workloads.keras.sections import KerasModel

BY_CLASSES = ("accuracy", "acc")
"""Names that Keras understands by the shapes of outputs; ours comes from counts of classes."""


class SummedMetrics:
    """The metrics of a run, by name."""

    def __init__(self, given: Sequence[Any]) -> None:
        found = [_metric(one) for one in given]
        self.all = {metric.name: metric for metric in found}
        self.tried = False

    @classmethod
    def of(cls, section: KerasModel, model: Any, loss: SampleLoss) -> SummedMetrics:
        """Those of the run file, else those of compile()."""
        compiled = keras.tree.flatten(getattr(model._compile_metrics, "_user_metrics", None)) if model.compiled else ()
        given = section.metrics or [one for one in compiled if one is not None]
        return cls([one for one in given if not (loss.of_classes and one in BY_CLASSES)])

    def sums(self, output: Any, y: Any, weight: Tensor | None = None) -> dict[str, Tensor]:
        """What each metric has counted after these samples alone."""
        found: dict[str, Tensor] = {}
        with on_device_of(first_leaf(output)):
            for name, metric in self.all.items():
                if not self.tried:
                    _refuse_unless_sums(name, metric, output, y)
                _update(metric, output, y, weight)
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


def _metric(given: Any) -> Any:
    if isinstance(given, keras.Metric):
        return given
    try:
        found = keras.metrics.get(given)
    except ValueError:
        known = sorted(name for name, value in vars(keras.metrics).items() if callable(value) and name.islower())
        hint = did_you_mean(given, known) or "; use a name of keras.metrics"
        raise UserError(f"model.metrics: keras.metrics has no {given!r}{hint}") from None
    if isinstance(found, keras.Metric):
        return found
    if given in BY_CLASSES:
        raise UserError(
            f"model.metrics: {given!r} means several things in Keras, and outputs are not of classes here; use "
            "binary_accuracy, categorical_accuracy or sparse_categorical_accuracy"
        )
    return keras.metrics.MeanMetricWrapper(found, name=given if isinstance(given, str) else found.__name__)


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
