"""Horovod's callbacks for `fit`, of Keras 3 or, with TF_USE_LEGACY_KERAS=1, of tf_keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from paceline.horovod.async_ops import Average
from paceline.horovod.tensorflow.bridge import allreduce, broadcast_variables
from paceline.horovod.world import size

Callback: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(Callback):
    """Set all variables to those of the root, after the first batch has created them."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.done = root_rank, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the weights of a model that is built, so that the first gradients are of one model."""
        if self.model.built:
            broadcast_variables(self.model.variables, self.root_rank)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.done:
            variables = self.model.optimizer.variables
            broadcast_variables(self.model.variables, self.root_rank)
            broadcast_variables(variables() if callable(variables) else variables, self.root_rank)
            self.done = True


class MetricAverageCallback(Callback):
    """Average the metrics of an epoch over ranks, for the callbacks that come after it."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            names = sorted(logs)
            mean = allreduce(tf.constant([float(logs[name]) for name in names], tf.float64), op=Average)
            logs.update(zip(names, mean.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(Callback):
    """Multiply the initial learning rate by a number, or by a function of the (fractional) epoch."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.multiplier: Any = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.staircase, self.steps_per_epoch, self.epoch = staircase and callable(multiplier), steps_per_epoch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        inside = self.start_epoch <= self.epoch and (self.end_epoch is None or self.epoch < self.end_epoch)
        if inside and (batch == 0 or not self.staircase):
            part = 0.0 if self.staircase or not self.steps_per_epoch else batch / self.steps_per_epoch
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(self.epoch + part)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from initial_lr / size to initial_lr over the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # the rate is reached with the last batch
            return 1 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
