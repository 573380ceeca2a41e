"""Gradients averaged over ranks: a tape and optimisers of Keras that do so before they apply them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from paceline.errors import UserError
from paceline.horovod.reduction import Average, Operation, ReduceRule, resolve_rule
from paceline.horovod.tensorflow.bridge import is_fp16, reduce_gradients


class DistributedGradientTape:
    """A tf.GradientTape whose `gradient` is averaged over ranks."""

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = None,
        sparse_as_dense: bool = False,
        op: Operation = Average,
        gradient_predivide_factor: float = 1.0,
    ) -> None:
        self._tape, self._fp16 = gradtape, is_fp16(compression)
        self._rule = _resolve_rule(op, gradient_predivide_factor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """Return the gradients of all ranks, averaged and sent as one message."""
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        return reduce_gradients(gradients, self._rule, self._fp16)


def _resolve_rule(op: Operation, predivide: float) -> ReduceRule:
    return resolve_rule(op, None, 1.0 / predivide, predivide)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Operation = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make a Keras optimiser average gradients over ranks first; its class keeps its name, so that saved models load.

    Optimisers of Keras 3 and of tf_keras, which public examples from before 2024 need, are taken.
    """
    if backward_passes_per_step != 1:
        message = f"backward_passes_per_step={backward_passes_per_step}: use Keras's gradient_accumulation_steps"
        raise UserError(message, code="not-supported", key="backward_passes_per_step")
    rule, fp16, base = _resolve_rule(op, gradient_predivide_factor), is_fp16(compression), type(optimizer)
    if hasattr(base, "apply") and hasattr(base, "build"):  # Keras 3

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return base.apply(self, reduce_gradients(list(grads), rule, fp16), trainable_variables)

        methods: dict[str, Any] = {"apply": apply}
    elif hasattr(base, "apply_gradients"):

        def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
            gradients, variables = zip(*grads_and_vars, strict=True)
            averaged = reduce_gradients(list(gradients), rule, fp16)
            return base.apply_gradients(self, zip(averaged, variables, strict=True), *args, **options)

        methods = {"apply_gradients": apply_gradients}
    else:
        raise UserError(f"DistributedOptimizer: a {base.__name__} is not an optimiser of Keras", code="invalid-value")
    optimizer.__class__ = type(base.__name__, (base,), {**methods, "__module__": base.__module__})
    return optimizer
