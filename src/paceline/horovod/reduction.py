"""How gradients are sent and combined: compression, operations, and factors before and after them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from paceline.errors import UserError
from paceline.horovod.unsupported import raise_no_adasum


class Compressor(Protocol):
    """Interface of compressors; scripts may bring their own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]: ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor: ...


class NoCompressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor:
    """Send floating-point tensors in 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """Values of `compression=`."""

    none = NoCompressor
    fp16 = FP16Compressor


class Operation(Enum):
    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum = Operation.AVERAGE, Operation.SUM, Operation.ADASUM
Min, Max, Product = Operation.MIN, Operation.MAX, Operation.PRODUCT
OPERATIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class ReduceRule:
    """An operation with the factors before and after it."""

    op: Operation
    before: float = 1.0
    after: float = 1.0

    def scale(self, buffer: Tensor) -> Tensor:
        """Scale the buffer before it is sent, in place if it is floating point."""
        return scale_buffer(buffer, self.before)

    def finish(self, buffer: Tensor, ranks: int) -> Tensor:
        """Scale the received buffer, in place if it is floating point."""
        if self.op is Average:
            buffer = buffer.div_(ranks) if _in_place(buffer) else (buffer.double() / ranks).to(buffer.dtype)
        return scale_buffer(buffer, self.after)


def scale_buffer(buffer: Tensor, factor: float) -> Tensor:
    """Scale in the type of the buffer; integers go through float64."""
    if factor == 1.0:
        return buffer
    return buffer.mul_(factor) if _in_place(buffer) else (buffer.double() * factor).to(buffer.dtype)


def _in_place(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def resolve_rule(op: Operation | None, average: bool | None, before: float = 1.0, after: float = 1.0) -> ReduceRule:
    """Resolve `op` and its older form `average`."""
    if op is not None and average is not None:
        raise UserError("average= is the older name of op=; give one of them, op=hvd.Sum or op=hvd.Average")
    if op is None:
        op = Sum if average is False else Average
    if op is Adasum:
        raise_no_adasum()
    if not isinstance(op, Operation):
        raise UserError(f"op={op!r} is not a reduction; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return ReduceRule(op, before, after)
