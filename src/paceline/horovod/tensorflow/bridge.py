"""TensorFlow tensors over the process group of torch.distributed, as numpy arrays on the CPU.

All tensors of a call travel as one message per type, in the order given: separate calls that one rank traced in
another order inside a tf.function would add up the wrong tensors without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.horovod import async_ops
from paceline.horovod.async_ops import Average, Operation, ReduceRule, resolve_rule
from paceline.horovod.world import place

AS_BYTES = {"bfloat16": torch.bfloat16}  # numpy's extension types, which torch reads from their bytes


def to_torch(array: Any) -> Tensor:
    array = np.ascontiguousarray(array)
    if (kind := AS_BYTES.get(array.dtype.name)) is not None:
        return torch.from_numpy(array.view(np.uint16).copy()).view(kind)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor, like: np.dtype) -> np.ndarray:
    return (tensor.view(torch.uint16) if like.name in AS_BYTES else tensor).numpy().view(like)


def exchange_arrays(arrays: Sequence[np.ndarray], send: Callable[[Tensor], Tensor]) -> list[np.ndarray]:
    """Return the arrays after `send`, which is called with all of a type in one flat tensor."""
    results: dict[int, np.ndarray] = {}
    for kind in sorted({array.dtype.name for array in arrays}):
        mine = [at for at, array in enumerate(arrays) if array.dtype.name == kind]
        flat = torch.cat([to_torch(arrays[at]).reshape(-1) for at in mine])
        parts = send(flat).split([arrays[at].size for at in mine])
        for at, part in zip(mine, parts, strict=True):
            results[at] = to_numpy(part.contiguous(), arrays[at].dtype).reshape(arrays[at].shape)
    return [results[at] for at in range(len(arrays))]


def run_on_arrays(
    work: Callable[..., list[np.ndarray]], tensors: Sequence[Any], same_shape: bool = True
) -> list[tf.Tensor]:
    """Return `work` of the tensors as arrays: now, or each time the tf.function that is traced runs."""
    place()  # raises before `init`
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]  # IndexedSlices become dense
    if not given:
        return []
    returned = tf.numpy_function(lambda *arrays: work(arrays), given, [tensor.dtype for tensor in given])
    found = tf.nest.flatten(returned)
    shapes = [tensor.shape if same_shape else [None, *tensor.shape[1:]] for tensor in given]
    return [tf.ensure_shape(result, shape) for result, shape in zip(found, shapes, strict=True)]


def reduce_tensors(tensors: Sequence[Any], rule: ReduceRule, fp16: bool = False) -> list[tf.Tensor]:
    """Return the reductions over ranks, sent as one message; None stays None."""
    kept = [at for at, tensor in enumerate(tensors) if tensor is not None]
    given = [tf.convert_to_tensor(tensors[at]) for at in kept]
    small = [tf.cast(one, tf.float16) if fp16 and one.dtype.is_floating else one for one in given]

    def work(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return exchange_arrays(arrays, lambda flat: async_ops.start_reduce(flat, rule).wait())

    found = [tf.cast(one, full.dtype) for one, full in zip(run_on_arrays(work, small), given, strict=True)]
    results: list[Any] = [None] * len(tensors)
    for at, result in zip(kept, found, strict=True):
        results[at] = result
    return results


def allreduce(tensor: Any, *args: Any, **options: Any) -> tf.Tensor:
    """Return the average over ranks, or the reduction `op`: `grouped_allreduce` of one tensor."""
    return grouped_allreduce([tensor], *args, **options)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Return the reductions of several tensors, sent together; gradients go through averages and sums."""
    rule = resolve_rule(op, average, prescale_factor, postscale_factor)
    fp16 = is_fp16(compression)

    @tf.custom_gradient
    def reduce(*given: Any) -> Any:
        return reduce_tensors(given, rule, fp16), lambda *upstream: reduce_tensors(upstream, rule, fp16)

    return list(reduce(*[tf.convert_to_tensor(tensor) for tensor in tensors]))


def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, which may differ between ranks."""

    def work(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        (array,) = arrays
        return [to_numpy(async_ops.start_gather(to_torch(array)).wait(), array.dtype)]

    return run_on_arrays(work, [tensor], same_shape=False)[0]


def broadcast_tensors(tensors: Sequence[Any], root_rank: int) -> list[tf.Tensor]:
    """Return the tensors of the root, of any type, sent as one message of bytes per type."""

    def send(flat: Tensor) -> Tensor:
        return async_ops.start_broadcast(flat.view(torch.uint8), root_rank).wait().view(flat.dtype)

    return run_on_arrays(lambda arrays: exchange_arrays(arrays, send), tensors)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    return broadcast_tensors([tensor], root_rank)[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Set variables to those of the root; seeds of random layers stay each rank's own."""
    kept = [variable for variable in variables if "seed_generator" not in getattr(variable, "path", "")]
    values = broadcast_tensors([tf.convert_to_tensor(variable) for variable in kept], root_rank)
    for variable, value in zip(kept, values, strict=True):
        variable.assign(value)


def reduce_gradients(gradients: Any, rule: ReduceRule, fp16: bool) -> Any:
    """Return a nest of gradients averaged over ranks; None where no rank may have one."""
    flat = tf.nest.flatten(gradients)
    return tf.nest.pack_sequence_as(gradients, reduce_tensors(flat, rule, fp16))


def is_fp16(compression: Any) -> bool:
    """Return whether `compression` is Compression.fp16; raise UserError for another than that or none."""
    name = getattr(compression, "__name__", str(compression))
    if compression is None or name == "Compressor":
        return False
    if name != "FP16Compressor":
        raise UserError(f"compression={name}: use hvd.Compression.none or hvd.Compression.fp16", key="compression")
    return True


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
        self._rule = resolve_rule(op, None, 1.0 / gradient_predivide_factor, gradient_predivide_factor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """Return the gradients of all ranks, averaged and sent as one message."""
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        return reduce_gradients(gradients, self._rule, self._fp16)


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
    """Return `optimizer` itself, changed to average gradients over ranks first; saved models keep the class name.

    Optimisers of Keras 3 and of tf_keras, which public examples from before 2024 need, are taken.
    """
    if backward_passes_per_step != 1:
        message = f"backward_passes_per_step={backward_passes_per_step}: use Keras's gradient_accumulation_steps"
        raise UserError(message, code="not-supported", key="backward_passes_per_step")
    rule = resolve_rule(op, None, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
    fp16, base = is_fp16(compression), type(optimizer)
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
