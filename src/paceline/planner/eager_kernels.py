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

from paceline.nn.keyed_dropout import mask_and_scale
from paceline.nn.op_counter import is_product
from paceline.parallel.precision import autocast

IN_FP32 = {"layer_norm", "group_norm", "softmax", "log_softmax", "exp", "log", "pow", "sum", "prod"}
IN_FP32 |= {"cumsum", "norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
IN_FP32 |= {"interpolate", "kl_div", "binary_cross_entropy_with_logits", "cosine_similarity"}
"""Functions that move much and that autocast runs in fp32 on CUDA."""
PASSES = {"norm": 2.8, "upsample": 8.0, "roll": 2.5}
"""Passes over what an operation with this in its name reads and writes, on an H200 with torch 2.11: moments are made
first, by kernels far below the bandwidth, and gradients are gathered from where they were scattered."""
REORDERED_PASSES = 3.0  # where channels are innermost but in a norm by groups of them, which is given copies
POOL_PASSES, POOL_OVERLAP = 0.6, 2.4  # of a pool, and for each window that a value is in
ROW_PASSES = (1.2, 720.0), (2.2, 1080.0), (1.7, 200.0)
"""Of a layer norm, and over its width, as few threads share a narrow row: forward; for gradients; for those of so many
rows that these are summed in parts."""
SUMMED_IN_PARTS = 1 << 16
BATCH_NORM_PASSES, BATCH_NORM_CHANNELS, BATCH_NORM_LAST, BATCH_NORM_GROUPED = 4.0, 1000.0, 3.7, 2.2
"""A batch norm has a block of threads per channel, so that few channels take more passes; if they come last, it has
many, and over groups of samples kernels of our own."""
SUMMED_BYTES, SUMMED_ROWS = 7.4e3, 40_000
"""As long as which it takes to add a row to a sum along columns, as gradients of biases are; more rows are added beside
each other."""
CONVOLUTION_BIAS_PASSES, CONVOLUTION_BIAS_SUM_PASSES = 3.1, 5.0  # where a convolution adds one, and over its gradients
CAT_LAST_PASSES = 2.3  # where channels that are innermost are put side by side
STRIDED_PASSES = 2.0  # over what is read in another order than it is written in
CONVOLUTION, ATTENTION = 1.27, 0.33
"""Of the rate of a plain product with the same sides, in whole tiles; what a convolution moves is counted beside it."""
PLAIN_UNITS = 0.06  # of the rate in 16 bits, in fp32, as attention is computed where no fused kernel takes its operands
CHANNELS, POSITIONS, FEATURES = 64, 128, 64
"""Sides of the tiles that these two work in: less than a tile takes as long as a whole one."""
CONVOLUTION_PASSES, GATHERED_PASSES = 0.7, 0.22
"""Of a convolution with channels innermost, over what goes in and out, and over the operand of its product, which is
gathered from overlapping windows. A depthwise one is no more than that, but its gradients take longer to gather."""
DEPTHWISE_GRADIENTS, DEPTHWISE_PASSES, DEPTHWISE_TAP = 2.0, 14.0, 0.9
"""The last two: in special kernels, where channels are not innermost, of 9 weights for a channel and of each beyond."""
TRANSPOSE_PASSES = 3.8  # where channels are not innermost, to put them there and back
COMPILED_SHARE = 0.6  # of all this, where a compiler writes operands as they are read next
ALIGNED, ODD_CHANNELS, ODD_PASSES = 8, 0.12, 4.8
"""Other numbers of channels, as of images, are filled up to a multiple of the first: at that rate, and with passes."""
ODD_GROUPS_PASSES = 19.0  # where channels of a group do not fill a tile evenly and are moved apart
CONVOLUTION_KERNELS, TRANSPOSE_KERNELS = 3, 3
"""A product, and what it works in cleared before it; its operands put in order, and its result put back."""
BACKWARD_KERNELS = 3  # of norms and attention
SORT_KERNELS, SORTED = 25, 3072
"""To sort the rows of a table whose gradients are added up, where a pass looks up more than so many."""
RECURRENT_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RECURRENT_WORKSPACE = {4: (3, 12), 3: (10, 20), 1: (4, 8)}
"""Widths of a word in what kernels work in, by the number of gates: one way, and both ways."""
TRANSPOSED_ARGUMENT, GROUPS_ARGUMENT = 6, 8  # of the arguments of a convolution
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
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attend
    try:
        with autocast(precision, torch.device("cpu")), _SimulatedCuda(torch.is_autocast_enabled("cpu")):
            yield
    finally:
        F.scaled_dot_product_attention = before


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
            return _drop(x, p) if training and 0 < p < 1 else x
        if func in (F.rms_norm, torch.rms_norm) and (fused := _fused_norm(*args, **kwargs)) is not None:
            return fused
        gates = RECURRENT_GATES.get(getattr(func, "__name__", ""))
        if gates and (found := _run_recurrent(gates, *args)) is not None:
            return found if func is torch.lstm else found[:2]
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
    last, workspace = [], None
    for layer in range(layers):
        made = []
        for side in range(sides):
            first, second, *biases = weights[per * (sides * layer + side) :][:per]
            given = F.linear(x, first, *biases[:1])
            width = given.shape[-1] // gates
            if workspace is None:
                sizes = (*given.shape[:2], RECURRENT_WORKSPACE[gates][both] * width)
                workspace = torch.empty(sizes, dtype=given.dtype, device=given.device)
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


def _drop(x: Tensor, p: float) -> Tensor:
    """Drop as it is done by the keys of samples: what is kept is drawn by a kernel of its own."""
    return mask_and_scale(x, torch.ones_like(x, dtype=torch.bool), 1 / (1 - p))


_fused_attention = F.scaled_dot_product_attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Store the scores where some are dropped: no fused kernel drops by the keys of samples."""
    if not 0 < dropout_p < 1:
        if attn_mask is not None and attn_mask.requires_grad and attn_mask.stride(-1) == 1:
            attend: Any = _MaskedAttention.apply
            found: Tensor = attend(query, key, value, attn_mask.to(query.dtype), enable_gqa)
            return found
        given = query, key, value, attn_mask, 0.0, is_causal
        return _fused_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal or attn_mask is not None:
        hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(hidden, 0.0)
    return _drop(scores.float().softmax(-1).to(value.dtype), dropout_p) @ value


class _MaskedAttention(torch.autograd.Function):
    """Attention with a trained mask for each score, which CPUs have no fused kernel for: its rows are filled up."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shared: bool) -> Tensor:
        out = _fused_attention(query, key, value, enable_gqa=shared)
        ctx.shape, mask = mask.shape, mask.expand(*query.shape[:-1], -1)
        ctx.save_for_backward(query, key, value, F.pad(mask, (0, -mask.shape[-1] % ALIGNED)), out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, _ = map(torch.empty_like, ctx.saved_tensors)
        mask = mask[..., : key.shape[-2]].clone()
        return query, key, value, mask.sum_to_size(ctx.shape), None


def estimate_kernel_efficiency(name: str, args: Any, out: Any) -> float:
    """Estimate the time of a plain product with the same sides over that of a GPU's kernel."""
    if name == "convolution":
        inside, outside = _group_sides(args[1], args[TRANSPOSED_ARGUMENT], args[GROUPS_ARGUMENT])
        seen = 1.0 if args[0].requires_grad else 1.5  # of three products, those that are made
        if inside == 1 < args[GROUPS_ARGUMENT]:
            return CONVOLUTION * seen
        filled = _tile_fill(inside, CHANNELS)
        if args[GROUPS_ARGUMENT] == 1:
            filled *= _tile_fill(outside, CHANNELS)
        if _is_odd(inside, outside, args[GROUPS_ARGUMENT]):
            filled = ODD_CHANNELS * _tile_fill(inside, ALIGNED) * _tile_fill(outside, CHANNELS)
        return CONVOLUTION * filled * seen
    if "attention" not in name:
        in_fp32 = torch.is_autocast_enabled("cpu") and out.dtype is torch.float32
        return PLAIN_UNITS if in_fp32 else 1.0
    length, span, width = args[0].shape[-2], args[1].shape[-2], args[0].shape[-1]
    return ATTENTION * _tile_fill(length, POSITIONS) * _tile_fill(span, POSITIONS) * _tile_fill(width, FEATURES)


def _tile_fill(side: int, tile: int) -> float:
    return side / (math.ceil(side / tile) * tile)


def estimate_traffic(
    name: str, args: Any, out: Any, more: float = 1.0, last: bool = False, grouped: bool = False
) -> KernelTraffic:
    """Estimate what an aten operation moves beside its arithmetic; the run has `more` times the samples.

    `last`: the channels of images are innermost. `grouped`: batch norms are over groups of samples.
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
        return KernelTraffic(total + SUMMED_BYTES * min(args[0].numel() / out.numel(), SUMMED_ROWS / more))
    if "batch_norm" in name and args[0].dim() > 2:
        passes = max(BATCH_NORM_PASSES, BATCH_NORM_CHANNELS / args[0].shape[1])
        if last and args[0].dim() == 4:
            passes = BATCH_NORM_GROUPED if grouped else BATCH_NORM_LAST
        return KernelTraffic(passes * total, BACKWARD_KERNELS if backward else 1)
    if name == "cat" and last and isinstance(out, Tensor) and out.dim() == 4:
        return KernelTraffic(CAT_LAST_PASSES * total)
    if "layer_norm" in name:
        width = math.prod(args[1 + backward])
        each, narrow = ROW_PASSES[backward + (backward and args[0].numel() / width * more > SUMMED_IN_PARTS)]
        return KernelTraffic((each + narrow / width) * total, BACKWARD_KERNELS if backward else 1)
    if "pool" in name and "adaptive" not in name:
        kernel, stride = (*args[1 + backward : 3 + backward], ())[:2]
        passes = POOL_PASSES + POOL_OVERLAP * (kernel[-1] / (stride or kernel)[-1]) ** len(kernel)
        return KernelTraffic(passes * total, BACKWARD_KERNELS if backward else 1)
    if word := next((word for word in PASSES if word in name), ""):
        copied = REORDERED_PASSES * (last and "group_norm" in name)
        return KernelTraffic((PASSES[word] + copied) * total, BACKWARD_KERNELS if backward else 1)
    return KernelTraffic((STRIDED_PASSES if _changes_strides(args, out) else 1.0) * total)


def _group_sides(weight: Tensor, transposed: bool, groups: int) -> tuple[int, int]:
    """Return the channels that a group of a convolution reads and writes."""
    sides = weight.shape[0] // groups, weight.shape[1]
    return sides if transposed else sides[::-1]


def _is_odd(inside: int, outside: int, groups: int) -> bool:
    return bool(inside * groups % ALIGNED or outside * groups % ALIGNED)


def _convolution_traffic(args: Any, out: Any, last: bool) -> KernelTraffic:
    """Count transposes too: images are stored channels first unless `last`, and products want channels last."""
    back = not isinstance(out, Tensor)
    given, made, weight = (args[1], args[0], args[2]) if back else (args[0], out, args[1])
    products, biased = (args[-1][0] + args[-1][1], args[-1][2]) if back else (1, args[2] is not None)
    groups = args[GROUPS_ARGUMENT + back]
    inside, outside = _group_sides(weight, args[TRANSPOSED_ARGUMENT + back], groups)
    depthwise, taps, flat = inside == 1 < groups, weight[0, 0].numel(), weight.dim() < 4
    places = [x.numel() // x.shape[1] for x in (given, made)]
    window = max(places) * DEPTHWISE_GRADIENTS if depthwise and back else min(places)
    pair = _tensor_bytes((given, made))
    moved = CONVOLUTION_PASSES * pair + GATHERED_PASSES * window * given.shape[1] * taps * given.element_size()
    if depthwise and (flat or not last):
        moved = (DEPTHWISE_PASSES + DEPTHWISE_TAP * max(0, taps - 9)) * pair
    elif _is_odd(inside, outside, groups):
        moved += (ODD_PASSES - CONVOLUTION_PASSES) * pair
    elif flat or not last:
        plain = taps == 1 and places[0] == places[1] and made[0, 0].numel() % ALIGNED == 0
        moved += TRANSPOSE_PASSES * pair * (not plain)
    elif groups > 1 and CHANNELS % inside and inside % CHANNELS:
        moved += ODD_GROUPS_PASSES * pair
    moved += 2 * TRANSPOSE_PASSES * pair * (flat and last)
    bias = (
        CONVOLUTION_BIAS_SUM_PASSES * _tensor_bytes(args[0])
        if back
        else 2 * CONVOLUTION_BIAS_PASSES * _tensor_bytes(out)
    )
    kernels = CONVOLUTION_KERNELS + TRANSPOSE_KERNELS * (flat or not last)
    return KernelTraffic(moved * products + biased * bias, kernels * products + biased)


def count_gathered(name: str, args: Any, out: Any) -> float:
    """Count what a convolution moves where it is compiled: a compiler leaves the channels of sequences outermost."""
    if name != "convolution":
        return 0.0
    plain = (*args[:2], None, *args[3:])  # its bias is added with what follows
    moved = _convolution_traffic(plain, out, last=args[1].dim() > 3).bytes
    return COMPILED_SHARE * moved / float(out.element_size())


def _tensor_bytes(tensors: Any) -> float:
    """Sum the bytes of the tensors in a structure; an expanded one is read once."""
    found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return float(sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in found))


def _sums_columns(x: Tensor, out: Tensor) -> bool:
    """Return whether rows are summed, rather than the values in a row."""
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
