"""Estimate what eager kernels move on a GPU, from a pass that is traced on the CPU or on fake tensors."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import finalize

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.nn.op_counter import is_product
from paceline.parallel.precision import autocast

IN_FP32 = {"layer_norm", "group_norm", "softmax", "log_softmax", "exp", "log", "pow", "sum", "prod"}
IN_FP32 |= {"cumsum", "norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
IN_FP32 |= {"kl_div", "binary_cross_entropy_with_logits", "cosine_similarity"}
"""Functions that move much and that autocast runs in fp32 on CUDA."""
PASSES = {"layer_norm_backward": 7.0, "norm": 4.0, "upsample": 18.0, "max_pool": 3.5}
"""Passes over what an operation with this in its name reads and writes, on an H200 with torch 2.11: moments are made
first, by kernels far below the bandwidth, and gradients are gathered from where they were scattered."""
BATCH_NORM_PASSES, BATCH_NORM_CHANNELS, BATCH_NORM_LAST = 4.0, 1000.0, 2.0
"""A batch norm has a block of threads per channel, so that few channels take more passes; if they come last, it has
many."""
SUM_PASSES = 6.0  # over what is summed along columns, as gradients of biases are
STRIDED_PASSES = 2.0  # over what is read in another order than it is written in
DEPTHWISE_PASSES = 14.0  # of a depthwise convolution: it multiplies little, in special kernels
CONVOLUTION, ATTENTION = 0.75, 0.5  # of the rate of a plain product with the same sides
CHANNELS, POSITIONS, FEATURES = 64, 128, 64
"""Sides of the tiles that these two work in: less than a tile takes as long as a whole one."""
CONVOLUTION_LAST_PASSES = 3.0  # of a convolution whose channels are innermost, beside its product
CONVOLUTION_KERNELS = 6  # a product, its operands in the order that tensor cores want, and its result put back
BACKWARD_KERNELS = 3  # of norms and attention
SORT_KERNELS, SORTED = 25, 3072
"""To sort the rows of a table whose gradients are added up, where a pass looks up more than so many."""
RECURRENT_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
LOOKED_UP = ("embedding", "index_select", "index", "gather")


@dataclass(frozen=True)
class KernelTraffic:
    """Of one operation beside its arithmetic, as bytes of a plain element-wise kernel that takes as long."""

    bytes: float
    kernels: float = 1

    def __add__(self, other: "KernelTraffic") -> "KernelTraffic":
        return KernelTraffic(self.bytes + other.bytes, self.kernels + other.kernels)


NO_TRAFFIC = KernelTraffic(0.0, 0)


@contextmanager
def simulate_cuda(precision: str) -> Iterator[None]:
    """Compute in the types that a CUDA device would use."""
    with autocast(precision, torch.device("cpu")), _SimulatedCuda(torch.is_autocast_enabled("cpu")):
        yield


class _SimulatedCuda(TorchFunctionMode):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            asked = inspect.signature(F.dropout).bind(*args, **kwargs)
            asked.apply_defaults()
            x, p, training, _ = asked.args
            return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 else x
        if func in (F.rms_norm, torch.rms_norm) and (fused := _fused_norm(*args, **kwargs)) is not None:
            return fused
        gates = RECURRENT_GATES.get(getattr(func, "__name__", ""))
        if gates and (found := _run_recurrent(gates, *args)) is not None:
            return found if func is torch.lstm else found[:2]
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            args, kwargs = _without_dropout(func, args, kwargs)
        if self.mixed and getattr(func, "__name__", "") in IN_FP32:
            half = (torch.bfloat16, torch.float16)
            args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in half else x, (args, kwargs))
        return func(*args, **kwargs)


_steps: ContextVar[int] = ContextVar("steps", default=1)


def count_steps() -> int:
    """Return in how many steps, one after the other, a device makes the product that is traced now."""
    return _steps.get()


def _run_recurrent(
    gates: int, x: Tensor, state: Any, weights: Any, biased: bool, layers: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Multiply and save what the layers of a device do, in place of what CPUs do; None for packed or projected ones.

    Products with the input are made at once, those with the state word by word.
    """
    if not isinstance(weights, Sequence) or x.dim() != 3:
        return None
    both, batch_first = options[-2:]
    per, sides, time = 4 if biased else 2, 2 if both else 1, int(batch_first)
    if len(weights) != per * sides * layers:
        return None
    last = []
    for layer in range(layers):
        made = []
        for side in range(sides):
            first, second, *biases = weights[per * (sides * layer + side) :][:per]
            given = F.linear(x, first, *biases[:1])
            width = given.shape[-1] // gates
            token = _steps.set(x.shape[time])
            try:
                given = given + F.linear(given[..., :width], second, *biases[1:])
            finally:
                _steps.reset(token)
            made.append(torch.tanh(given[..., :width]))
            last.append(made[-1].select(time, -1))
        x = torch.cat(made, -1) if both else made[0]
    return x, torch.stack(last), torch.stack(last)


def _fused_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor | None:
    """Use the fused kernel of devices, which saves and moves what a layer norm does, if all is of one type."""
    if weight is not None and weight.dtype != x.dtype:
        return None
    return torch.native_layer_norm(x, list(shape), weight, None, eps or 0.0)[0]


def _without_dropout(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Drop nothing: unlike devices, CPUs save the scores of an attention with dropout."""
    if func is F.scaled_dot_product_attention:
        return (args[:4], {**kwargs, "dropout_p": 0.0}) if len(args) < 5 else ((*args[:4], 0.0, *args[5:]), kwargs)
    asked = inspect.signature(func).bind(*args, **kwargs)
    asked.arguments["dropout_p"] = 0.0
    return asked.args, asked.kwargs


def estimate_kernel_efficiency(name: str, args: Any, out: Any) -> float:
    """Estimate the time of a plain product with the same sides over that of a GPU's kernel."""
    if name == "convolution":
        return CONVOLUTION * _tile_fill(out.shape[1], CHANNELS)
    if "attention" not in name:
        return 1.0
    length, span, width = args[0].shape[-2], args[1].shape[-2], args[0].shape[-1]
    return ATTENTION * _tile_fill(length, POSITIONS) * _tile_fill(span, POSITIONS) * _tile_fill(width, FEATURES)


def _tile_fill(side: int, tile: int) -> float:
    return side / (math.ceil(side / tile) * tile)


def estimate_traffic(name: str, args: Any, out: Any, more: float = 1.0, last: bool = False) -> KernelTraffic:
    """Estimate what an aten operation moves beside its arithmetic; the run has `more` times the samples.

    `last`: the channels of images are innermost.
    """
    backward = "backward" in name
    if name.startswith("convolution"):
        return _convolution_traffic(args, out, last)
    if is_product(name):
        return KernelTraffic(0.0, BACKWARD_KERNELS if backward else 1)
    if name in LOOKED_UP:
        return KernelTraffic(2.0 * _tensor_bytes(out), 2)
    if name == "_embedding_bag":
        return KernelTraffic(2.0 * args[1].numel() * args[0].shape[-1] * args[0].element_size())
    total = _tensor_bytes((args, out))
    if "embedding" in name:
        return KernelTraffic(total, SORT_KERNELS if args[1].numel() * more > SORTED else 2)
    if name in ("sum", "mean") and isinstance(out, Tensor) and _sums_columns(args[0], out):
        return KernelTraffic(SUM_PASSES * total)
    if "batch_norm" in name and args[0].dim() > 2:
        passes = max(BATCH_NORM_PASSES, BATCH_NORM_CHANNELS / args[0].shape[1])
        passes = BATCH_NORM_LAST if last and args[0].dim() == 4 else passes
        return KernelTraffic(passes * total, BACKWARD_KERNELS if backward else 1)
    word = next((word for word in PASSES if word in name), "")
    if word == "upsample" and not backward:
        word = ""  # as fast as any
    if word:
        return KernelTraffic(PASSES[word] * total, BACKWARD_KERNELS if backward else 1)
    return KernelTraffic((STRIDED_PASSES if _changes_strides(args, out) else 1.0) * total)


def _convolution_traffic(args: Any, out: Any, last: bool) -> KernelTraffic:
    """Count transposes too: images are stored channels first unless `last`, and products want channels last."""
    back = not isinstance(out, Tensor)
    pair, weight = (args[:2], args[2]) if back else ((args[0], out), args[1])
    products, summed = (args[-1][0] + args[-1][1], args[-1][2]) if back else (1, False)
    passes, kernels = 2 * STRIDED_PASSES, CONVOLUTION_KERNELS
    if weight.dim() > 3 and weight.shape[1] == 1 < weight.shape[0]:
        passes = DEPTHWISE_PASSES
    elif last and weight.dim() == 4:
        passes, kernels = CONVOLUTION_LAST_PASSES, 2
    sums = SUM_PASSES * _tensor_bytes(args[0]) if summed else 0.0
    return KernelTraffic(passes * products * _tensor_bytes(pair) + sums, kernels * products + summed)


def _tensor_bytes(tensors: Any) -> float:
    """Sum the bytes of the tensors in a structure; an expanded one is read once."""
    found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return float(sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in found))


def _sums_columns(x: Tensor, out: Tensor) -> bool:
    """Whether rows are summed, rather than the values in a row."""
    return out.numel() < x.numel() and out.dim() > 0 and x.shape[-1] > 1 and out.shape[-1] == x.shape[-1]


def _changes_strides(args: Any, out: Any) -> bool:
    if not isinstance(out, Tensor) or out.dim() < 2:
        return False
    same = (x for x in tree_leaves(args) if isinstance(x, Tensor) and x.shape == out.shape)
    return any(x.stride() != out.stride() and 0 not in x.stride() for x in same)


class LiveBytes:
    def __init__(self) -> None:
        self.changes: list[int] = []
        self._known: set[int] = set()

    def track(self, tensors: Any) -> None:
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and id(storage := leaf.untyped_storage()) not in self._known:
                self._known.add(id(storage))
                self.changes.append(storage.nbytes())
                finalize(storage, self._on_freed, id(storage), storage.nbytes())

    def _on_freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.changes.append(-size)


def find_peak_growth(small: LiveBytes, large: LiveBytes, more: float) -> float:
    """Find the bytes that each of `more` samples adds at the peak; 0 if the two passes differ."""
    if len(small.changes) != len(large.changes) or not more:
        return 0.0
    each = ((b - a) / more for a, b in zip(small.changes, large.changes, strict=True))
    return max(accumulate(each), default=0.0)
