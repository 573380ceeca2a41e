"""The type of matrix products; weights, gradients and optimiser stay in fp32 (fp64 for `fp64`)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.config import Train
from paceline.errors import reject_value

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
IN_BF16 = ("bf16", "fp8")
ALIGNED = 16  # sides of fp8 matrices: other layers stay in bf16, rows are padded
MIN_FP8 = (8, 9)


def to_at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ComputeInFp64(TorchFunctionMode):
    """Compute in fp64 where a model asks for fp32, as in `x.float()` and `softmax(dtype=torch.float32)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        double = partial(tree_map_only, torch.dtype, lambda kind: torch.float64 if kind is torch.float32 else kind)
        found = (Tensor.double if func is Tensor.float else func)(*double(args), **double(kwargs or {}))
        if not isinstance(found, Tensor) or found.dtype != torch.float32:
            return found
        # such as bytes / 255; what fp32 gives may be a view of it that is written to
        begins = not any(isinstance(given, Tensor) and given.dtype == torch.float32 for given in tree_leaves(args))
        return found.double() if begins else found


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp64":
        return ComputeInFp64()
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


def set_tf32(precision: str) -> None:
    """Allow TF32 products in this process for `tf32`; else keep torch's or the user's choice."""
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


class Scaler:
    """The loss scale of fp16, the same on all ranks; 1 for other precisions."""

    def __init__(self, train: Train, device: torch.device) -> None:
        self.adapts = train.precision == "fp16" and train.loss_scale == "dynamic"
        self.window = train.loss_scale_window
        first = train.loss_scale_start if train.loss_scale == "dynamic" else train.loss_scale
        self.scale = torch.tensor(first if train.precision == "fp16" else 1.0, device=device)
        self.good = torch.zeros((), device=device)

    def update(self, finite: Tensor) -> None:
        """Halve the scale after an overflow, double it after a long time without."""
        if not self.adapts:
            return
        good = torch.where(finite, self.good + 1, 0.0)
        grow = good >= self.window
        self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5))
        self.good.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good}


def use_fp8(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Turn linear layers whose sides fit into Fp8Linear; raise UserError if the CUDA device has no fp8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_FP8:
        reason = f"{torch.cuda.get_device_name(device)} has no fp8 products; use bf16"
        raise reject_value("train.precision", "fp8", reason, "unavailable")
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear and not any(size % ALIGNED for size in module.weight.shape):
                module.__class__ = Fp8Linear  # names and weights stay


class Fp8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        spare = -len(x_ND) % ALIGNED  # for the gradient of the weight, a sum over rows
        y_NO = _Fp8Product.apply(F.pad(x_ND, (0, 0, 0, spare)) if spare else x_ND, self.weight)
        y = y_NO[: len(x_ND)].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def scale_to_fp8(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (x over a scale, as that type; the scale): the largest number becomes the largest of the type."""
    largest = torch.finfo(kind).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(kind).contiguous(), scale


def compute_fp8_product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    (a, scale_a), (b, scale_b) = left, right
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=a.is_cuda
    )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        x, weight = scale_to_fp8(x_ND, torch.float8_e4m3fn), scale_to_fp8(weight_OD, torch.float8_e4m3fn)
        ctx.save_for_backward(*x, *weight)
        ctx.types = x_ND.dtype, weight_OD.dtype
        return compute_fp8_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor]:
        x8_ND, x_scale, weight8_OD, weight_scale = ctx.saved_tensors
        dy8_NO, dy_scale = scale_to_fp8(incoming[0], torch.float8_e5m2)
        dx_ND = compute_fp8_product((dy8_NO, dy_scale), (weight8_OD.t().contiguous(), weight_scale))
        dweight_OD = compute_fp8_product((dy8_NO.t().contiguous(), dy_scale), (x8_ND.t().contiguous(), x_scale))
        return dx_ND.to(ctx.types[0]), dweight_OD.to(ctx.types[1])
