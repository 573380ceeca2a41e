"""Linear layers whose frozen weight is kept in 4 bits (NF4, Dettmers et al. 2023), as QLoRA does.

A weight is one plain tensor of bytes, a row for each output: two values to a byte, then a scale in bf16 for each block.
Sharding, checkpoints and copies see no more than that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, BLOCK_BYTES = 64, 34
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, among them 0, from -1 to 1."""
TABLES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


class NF4Linear(nn.Module):
    """What a linear layer becomes by `quantise_linear`; `weight` keeps its name."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        y: Tensor = _Product.apply(x.to(kind), self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x Wᵀ, for whose gradient the weight is unpacked once more instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return incoming[0] @ unpack(packed, incoming[0].dtype), None


def quantise_linear(layer: nn.Linear) -> None:
    """Turn a layer into an NF4Linear whose 4-bit weight is allocated only; its values are read later."""
    rows, columns = layer.weight.shape
    packed = torch.empty(rows, columns // BLOCK * BLOCK_BYTES, dtype=torch.uint8, device=layer.weight.device)
    layer.__class__ = NF4Linear  # type: ignore[assignment]
    layer.weight = nn.Parameter(packed, requires_grad=False)


def can_quantise(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not layer.in_features % BLOCK


def pack(weight: Tensor) -> Tensor:
    """Return a weight in 4 bits, as bytes."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).to(torch.bfloat16)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(blocks / scales.float().clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).flatten(-2)
    return torch.cat([codes[..., ::2] << 4 | codes[..., 1::2], scales.squeeze(-1).contiguous().view(torch.uint8)], -1)


def unpack(packed: Tensor, kind: torch.dtype) -> Tensor:
    columns = packed.shape[-1] // BLOCK_BYTES * BLOCK
    codes, scales = packed.split((columns // 2, columns // 32), -1)
    values = F.embedding(codes.int(), make_table(packed.device, kind)).view(*packed.shape[:-1], -1, BLOCK)
    return (values * scales.contiguous().view(torch.bfloat16)[..., None].to(kind)).flatten(-2)


def make_table(device: torch.device, kind: torch.dtype) -> Tensor:
    """Return the two values of each byte."""
    if (device, kind) not in TABLES:
        levels = torch.tensor(LEVELS, dtype=kind, device=device)
        TABLES[device, kind] = torch.stack(torch.meshgrid(levels, levels, indexing="ij"), -1).view(256, 2)
    return TABLES[device, kind]


def count_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter; of a packed one, before packing."""
    return parameter.numel() // BLOCK_BYTES * BLOCK if parameter.dtype == torch.uint8 else parameter.numel()


class PackedTarget:
    """Packed bytes, or a shard of them, as what is read into them sees it: a weight in full."""

    def __init__(self, packed: Any) -> None:
        self.packed, self.ndim = packed, 2
        self.shape = (packed.shape[0], packed.shape[1] // BLOCK_BYTES * BLOCK)
        if hasattr(packed, "device_mesh"):
            self.device_mesh = packed.device_mesh

    def to_local(self) -> PackedTarget:
        return PackedTarget(self.packed.to_local())

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        chunks = self.packed.__create_chunk_list__()
        whole = self.shape[1]
        return [ChunkStorageMetadata(torch.Size([c.offsets[0], 0]), torch.Size([c.sizes[0], whole])) for c in chunks]

    def numel(self) -> int:
        return count_elements(self.packed)

    def copy_(self, weight: Tensor) -> None:
        self.packed.copy_(pack(weight.to(self.packed.device)))

    def isnan(self) -> Tensor:
        scales = self.packed[:, self.shape[1] // 2 :].contiguous().view(torch.bfloat16)
        return scales.isnan()
