"""Many tensors sent as a few: laid end to end, and copied back to where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

AT_ONCE_BYTES = 25_000_000
T = TypeVar("T", bound=Tensor)


def buckets(tensors: Iterable[T], most_bytes: int = AT_ONCE_BYTES) -> Iterator[list[T]]:
    """Neighbours of one type, about that many bytes at a time."""
    bucket: list[T] = []
    for tensor in tensors:
        alike = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or sum(t.nbytes for t in bucket) >= most_bytes):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def copy_parts(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor, which may be longer, to where they belong."""
    sizes = [t.numel() for t in tensors]
    for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over ranks; the same bits on all of them."""
    if not dist.is_initialized():
        return
    for bucket in buckets(tensors):
        flat = flattened(bucket)
        dist.all_reduce(flat)
        copy_parts(flat.div_(dist.get_world_size()), bucket)
