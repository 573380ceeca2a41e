"""Collectives of several tensors: all are under way before the first is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from paceline.horovod import collectives
from paceline.horovod.collectives import Factors
from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.handles import Handle, combine_handles
from paceline.horovod.reduction import Average, Operation
from paceline.horovod.unsupported import ProcessSet

Tensors = Sequence[torch.Tensor]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    if compression is not Compression.none or any(tensor.requires_grad for tensor in tensors):
        return [collectives.allreduce(tensor, average, name, compression, op, **factors) for tensor in tensors]
    return grouped_allreduce_async(tensors, average, name, op, **factors).wait()


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    return grouped_allreduce_async_(tensors, average, name, op, **factors).wait()


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[list[torch.Tensor]]:
    return combine_handles([collectives.allreduce_async(tensor, average, name, op, **factors) for tensor in tensors])


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Operation | None = None,
    **factors: Unpack[Factors],
) -> Handle[list[torch.Tensor]]:
    return combine_handles([collectives.allreduce_async_(tensor, average, name, op, **factors) for tensor in tensors])


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    return [collectives.allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[torch.Tensor]]:
    return combine_handles([collectives.allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_reducescatter(
    tensors: Tensors,
    compression: type[Compressor] = Compression.none,
    name: str | None = None,
    op: Operation = Average,
    **factors: Unpack[Factors],
) -> list[torch.Tensor]:
    return [collectives.reducescatter(tensor, compression, name, op, **factors) for tensor in tensors]


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: Operation = Average, **factors: Unpack[Factors]
) -> Handle[list[torch.Tensor]]:
    return combine_handles([collectives.reducescatter_async(tensor, name, op, **factors) for tensor in tensors])
