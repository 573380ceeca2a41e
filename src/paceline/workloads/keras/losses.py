"""The loss of a Keras model, sample by sample, and what its outputs say of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.classification import class_sums
from paceline.errors import UserError, did_you_mean
from paceline.nn.keras_module import keras, on_device_of
from paceline.parallel.precision import at_least_fp32
from paceline.registry import function_of
from paceline.workloads.keras.sections import KerasModel

KEY = "model.loss"
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
        masks = [getattr(first_leaf(output), "_keras_mask", None)]
        output = tree_map(at_least_fp32, output)
        like = first_leaf(output)
        y = tree_map(lambda part: part.to(like.dtype), y)
        with on_device_of(like):
            each = self.of.call(y, output) if isinstance(self.of, keras.Loss) else self.of(*_alike(y, output))
        if not isinstance(each, Tensor) or not each.ndim or len(each) != len(like):
            raise UserError(
                f"{KEY}: {self.name} does not give a loss for each sample, as keras.losses.mean_squared_error does; "
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
        output, raw = at_least_fp32(output), self.of.get_config()["from_logits"]
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


def first_leaf(structure: Any) -> Tensor:
    return keras.tree.flatten(structure)[0]


def _alike(y: Any, output: Any) -> tuple[Any, Any]:
    """As fit() hands them to a function: (n,) and (n, 1), taken as they are, would make n × n differences."""
    if not isinstance(y, Tensor) or not isinstance(output, Tensor):
        return y, output
    from keras.src.losses.loss import squeeze_or_expand_to_same_rank

    return squeeze_or_expand_to_same_rank(y, output)


def loss_of(section: KerasModel, model: Any) -> SampleLoss:
    """That of the run file, else that of compile()."""
    if ":" in section.loss:
        return SampleLoss(function_of(section.loss, KEY), section.loss.rpartition(":")[2])
    if section.loss:
        return _named(section.loss, section.from_logits)
    _refuse_own_steps(type(model))
    given = model.loss if model.compiled else None
    if isinstance(given, dict | list | tuple) and len(given) == 1:
        given = next(iter(given.values() if isinstance(given, dict) else given))
    if not given:
        raise UserError(
            f"{KEY} is not given, and the model is not compiled with one; write  "
            "model: {build: file.py:build, loss: mean_squared_error}  or call  model.compile(loss=…)"
        )
    if isinstance(given, dict | list | tuple) or model._compile_loss._user_loss_weights:
        raise UserError(
            f"{KEY}: several losses, or loss_weights, of compile() are not carried over; write a function of "
            f"(y, outputs) that gives a loss per sample, and  {KEY}=file.py:function"
        )
    return _named(given, False) if isinstance(given, str) else _object(given)


def _refuse_own_steps(kind: type) -> None:
    """What a model computes there is not what its compiled loss says."""
    for name in ("train_step", "compute_loss"):
        if getattr(kind, name) is not getattr(keras.Model, name):
            raise UserError(
                f"{KEY}: {kind.__name__} has its own {name}, which is not called here; write its loss as a function of "
                f"(y, outputs) that gives a loss per sample, and  {KEY}=file.py:function"
            )


def _named(name: str, from_logits: bool) -> SampleLoss:
    kinds = {_plain(key): kind for key, kind in vars(keras.losses).items() if isinstance(kind, type)}
    if kind := kinds.get(_plain(name)):
        return SampleLoss(kind(from_logits=True) if from_logits else kind(), name)
    try:
        return SampleLoss(keras.losses.get(name), name)
    except ValueError:
        known = sorted(key for key, value in vars(keras.losses).items() if callable(value) and key.islower())
        hint = did_you_mean(name, known) or "; use a name of keras.losses, or file.py:function"
        raise UserError(f"{KEY}: there is no keras.losses.{name}{hint}") from None


def _plain(name: str) -> str:
    """SparseCategoricalCrossentropy and sparse_categorical_crossentropy are one."""
    return name.replace("_", "").lower()


def _object(given: Any) -> SampleLoss:
    if not isinstance(given, keras.Loss):
        return SampleLoss(given, getattr(given, "__name__", type(given).__name__))
    if given.reduction not in MEANS:
        raise UserError(
            f"{KEY}: {given.name} has reduction={given.reduction!r}, and losses are averaged over the global batch "
            "here; leave reduction out"
        )
    return SampleLoss(given, given.name)
