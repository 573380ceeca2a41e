"""Build the Keras model of a run file, its loss per sample, and metrics that are summed over ranks."""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.config import RunSpec
from paceline.config.registry import describe_error, guard_user_code, load_user_function
from paceline.errors import Code, UserError, did_you_mean, reject_value
from paceline.nn.class_metrics import class_sums
from paceline.nn.keras_backend import is_keras
from paceline.nn.keras_module import KerasModule, keras, reset_keras_names, use_device_of
from paceline.parallel.precision import to_at_least_fp32
from paceline.workloads.keras.sections import SAVED, KerasModel
from paceline.workloads.keras.workload import guard_model_call

BUILD_KEY, LOSS_KEY = "model.build", "model.loss"
MEANS = ("sum_over_batch_size", "mean", "none", None)  # reductions that agree with a mean over the global batch
LEAST_PROBABILITY = 1e-7
NOT_COUNTED = -1
BY_SHAPES = ("accuracy", "acc")  # names of a metric that Keras chooses by the shapes of targets and outputs
FUNCTION_HINT = f"write a function of (y, outputs) that gives a loss per sample, and  {LOSS_KEY}=file.py:function"


def build_keras_model(spec: RunSpec, section: KerasModel, make_input: Callable[[], Any]) -> KerasModule:
    """Build the model; one that takes its shapes from the first call is called with `make_input()`."""
    with reset_keras_names(spec.train.seed):
        file = Path(section.build)
        model = _load_saved(file) if file.suffix == SAVED else _call_builder(section)
        if not model.built:
            with guard_model_call():
                model(make_input(), training=False)
    return KerasModule(model)


def _call_builder(section: KerasModel) -> Any:
    function = load_user_function(section.build, BUILD_KEY)
    try:
        inspect.signature(function).bind(**section.arguments)
    except TypeError as error:
        raise UserError(f"model.arguments: {section.build} {error}", key="model.arguments") from None
    with guard_user_code(BUILD_KEY, section.build):
        found = function(**section.arguments)
    if not is_keras(found) or not isinstance(found, nn.Module):
        reason = f"returned {type(found).__name__}, expected a keras.Model"
        raise reject_value(BUILD_KEY, section.build, reason, "invalid-workload")
    return found


def _load_saved(file: Path) -> Any:
    """Load a .keras file; Keras rejects functions that are saved as code."""
    if not file.is_file():
        raise reject_value(BUILD_KEY, file, "no such file", "not-found")
    try:
        return keras.saving.load_model(file, safe_mode=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        hint = "if it has your own layers, type  model=file.py:function"
        raise reject_value(BUILD_KEY, file, f"{describe_error(error)}; {hint}", "unreadable") from None


@dataclass(frozen=True)
class SampleLoss:
    """A loss of Keras, or a function of (y, output), before the reduction."""

    of: Any
    name: str

    def __call__(self, output: Any, y: Any, weight: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
        """Return (sum of the losses, their number), counted as Keras does: their ratio is the loss of fit()."""
        masks = [getattr(get_first_leaf(output), "_keras_mask", None)]
        output = tree_map(to_at_least_fp32, output)
        like = get_first_leaf(output)
        y = tree_map(lambda part: part.to(like.dtype), y)
        with use_device_of(like):
            if isinstance(self.of, keras.Loss):
                each = self.of.call(y, output)
            elif isinstance(y, Tensor) and isinstance(output, Tensor):  # (n,) and (n, 1) would broadcast to n × n
                from keras.src.losses.loss import squeeze_or_expand_to_same_rank

                each = self.of(*squeeze_or_expand_to_same_rank(y, output))
            else:
                each = self.of(y, output)
        if not isinstance(each, Tensor) or not each.ndim or len(each) != len(like):
            raise _loss_error(f"{self.name} must give a loss for each sample; leave out the mean", "invalid-workload")
        masks.append(getattr(each, "_keras_mask", None))
        if weight is not None:
            each = each * weight.to(each.dtype).view(-1, *[1] * (each.ndim - 1))
        if not (given := [mask for mask in masks if mask is not None]):
            return each.sum(), each.numel()
        counted = torch.stack([mask.to(each.dtype).expand_as(each) for mask in given]).prod(0)
        return (each * counted).sum(), counted.sum()

    def logits(self, output: Any) -> Tensor | None:
        """Return (…, classes), up to a constant for each row; None unless outputs are scores of classes."""
        losses, one = keras.losses, isinstance(self.of, keras.losses.BinaryCrossentropy)
        several = isinstance(self.of, losses.SparseCategoricalCrossentropy | losses.CategoricalCrossentropy)
        if not (one or several) or not isinstance(output, Tensor) or output.ndim < 2:
            return None
        output, raw = to_at_least_fp32(output), self.of.get_config()["from_logits"]
        if several:
            return output if raw else output.clamp(min=LEAST_PROBABILITY).log()
        if output.shape[-1] != 1:  # several questions, each with yes or no
            return None
        odds = output if raw else torch.logit(output, eps=LEAST_PROBABILITY)
        return torch.cat([torch.zeros_like(odds), odds], -1)

    def class_sums(self, output: Any, y: Any) -> dict[str, Tensor]:
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


def resolve_loss(section: KerasModel, model: Any) -> SampleLoss:
    if ":" in section.loss:
        return SampleLoss(load_user_function(section.loss, LOSS_KEY), section.loss.rpartition(":")[2])
    if section.loss:
        return _find_loss(section.loss, section.from_logits)
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise _loss_error(f"{type(model).__name__} has its own {name}, which is not called; {FUNCTION_HINT}")
    given = model.loss if model.compiled else None
    if isinstance(given, dict | list | tuple) and len(given) == 1:
        given = next(iter(given.values() if isinstance(given, dict) else given))
    if not given:
        raise _loss_error("not given; type  model.loss=NAME  or call  model.compile(loss=…)", "missing-value")
    if isinstance(given, dict | list | tuple) or model._compile_loss._user_loss_weights:
        raise _loss_error(f"several losses or loss_weights in compile() are not supported; {FUNCTION_HINT}")
    if isinstance(given, str):
        return _find_loss(given, False)
    if not isinstance(given, keras.Loss):
        return SampleLoss(given, getattr(given, "__name__", type(given).__name__))
    if given.reduction not in MEANS:
        raise _loss_error(f"{given.name} has reduction={given.reduction!r}, expected a mean; leave reduction out")
    return SampleLoss(given, given.name)


def _loss_error(reason: str, code: Code = "not-supported") -> UserError:
    return UserError(f"{LOSS_KEY}: {reason}", code=code, key=LOSS_KEY)


def _find_loss(name: str, from_logits: bool) -> SampleLoss:
    plain = name.replace("_", "").lower()
    for key, kind in vars(keras.losses).items():
        if isinstance(kind, type) and key.lower() == plain:
            return SampleLoss(kind(from_logits=True) if from_logits else kind(), name)
    try:
        return SampleLoss(keras.losses.get(name), name)
    except ValueError:
        raise _unknown_name(LOSS_KEY, "losses", name) from None


def _unknown_name(key: str, module: str, name: str) -> UserError:
    values = vars(getattr(keras, module)).items()
    hint = did_you_mean(name, sorted(known for known, value in values if callable(value) and known.islower()))
    return UserError(f"{key}: there is no keras.{module}.{name}{hint}", code="unknown-name", key=key)


class SummedMetrics:
    """The Keras metrics of a run, by name.

    Such a metric computes its result from sums over samples, so it is exact on any number of ranks. Whether it keeps
    sums is tried out on the first samples.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = given
        self.all: dict[str, Any] = {}

    @classmethod
    def of(cls, section: KerasModel, model: Any) -> "SummedMetrics":
        if section.metrics or not model.compiled:
            return cls(section.metrics)
        found = keras.tree.flatten(getattr(model._compile_metrics, "_user_metrics", None))
        return cls([metric for metric in found if metric is not None])

    def sums(self, output: Any, y: Any, without: Container[str]) -> dict[str, Tensor]:
        """Return what each metric, `without` some, has summed over these samples."""
        found: dict[str, Tensor] = {}
        with use_device_of(get_first_leaf(output)):
            if not self.all:
                self._resolve(output, y)
            for name in [name for name in self.all if name not in without]:
                metric = self.all[name]
                _update_metric(metric, output, y)
                found |= {f"{name}[{i}]": v.value.detach().double() for i, v in enumerate(metric.variables)}
        return found

    def _resolve(self, output: Any, y: Any) -> None:
        """Build the metrics as Keras does: what "accuracy" means depends on the shapes."""
        from keras.src.trainers.compile_utils import get_metric

        for given in self.given:
            try:
                metric = get_metric(given, y, output)
            except ValueError:
                raise _unknown_name("model.metrics", "metrics", given) from None
            _check_keeps_sums(metric.name, metric, output, y)
            self.all[metric.name] = metric

    def results(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        with keras.device("cpu"):
            for name, metric in self.all.items():
                if f"{name}[0]" in sums:
                    for i, variable in enumerate(metric.variables):
                        variable.value.data = torch.as_tensor(sums[f"{name}[{i}]"], dtype=variable.value.dtype)
                    result = np.asarray(metric.result())
                    found[name] = result if result.ndim else result.item()
        return found

    def among(self, sums: Mapping[str, Any]) -> set[str]:
        return {key for key in sums if key.rpartition("[")[0] in self.all}


def _update_metric(metric: Any, output: Any, y: Any) -> None:
    metric.reset_state()
    for variable in metric.variables:  # they are on the device where they were first needed
        variable.value.data = variable.value.data.to(get_first_leaf(output).device)
    metric.update_state(y, output)


def _check_keeps_sums(name: str, metric: Any, output: Any, y: Any) -> None:
    """Raise UserError if the values of two halves do not add up: over several chunks the metric would be wrong."""
    half = len(get_first_leaf(output)) // 2
    if not half:
        return
    counted = []
    for part in (slice(None), slice(0, half), slice(half, None)):
        _update_metric(metric, *(tree_map(lambda rows, part=part: rows[part], tree) for tree in (output, y)))
        counted.append([variable.value.detach().double().clone() for variable in metric.variables])
    for whole, first, second in zip(*counted, strict=True):
        if not torch.allclose(whole, first + second, rtol=1e-4, atol=1e-6):
            raise reject_value("model.metrics", name, "keeps no sums, so ranks cannot share it; leave it out")
