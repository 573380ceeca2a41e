"""Counts as the kernels of a device want them: in whole tiles; and their sums."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.counts.on_device import PIECE
from paceline.workloads.topics.sizes import padded

Tensor = Any  # torch.Tensor; torch is not typed here


def triton_runs_on(device: Any) -> bool:
    """Whether kernels can run: on a CUDA device, or on the CPU under Triton's interpreter, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def say_plain() -> None:
    print(
        "topics: Triton is not installed; plain torch, about 10 times slower. Type: pip install triton", file=sys.stderr
    )


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Dense counts on the device, padded with zeros to whole tiles."""
    rows, terms = values.shape
    counts = torch.zeros(padded(rows), padded(terms), dtype=torch.from_numpy(values[:0]).dtype, device=device)
    copy_rows(values, counts[:rows, :terms])
    return counts


def whole_tiles(values: Tensor) -> Tensor:
    """Dense counts padded with zeros to whole tiles; themselves where they are that."""
    if not whole_tiles_bytes(values):
        return values
    rows, terms = values.shape
    counts = torch.empty(padded(rows), padded(terms), dtype=values.dtype, device=values.device)
    counts[rows:], counts[:, terms:] = 0, 0
    there = counts[:rows, :terms]
    if terms * values.element_size() % 8 == 0:  # eight bytes at a time: a byte at a time takes several times as long
        values, there = values.view(torch.int64), there.view(torch.int64)
    there.copy_(values)
    return counts


def whole_tiles_bytes(values: Tensor) -> int:
    """What the copy of `whole_tiles` takes."""
    rows, terms = values.shape
    if values.is_contiguous() and (padded(rows), padded(terms)) == (rows, terms):
        return 0
    return padded(rows) * padded(terms) * values.element_size()


def copy_rows(values: np.ndarray, there: Tensor) -> None:
    """In pieces: a copy between matrices of different widths takes the device's memory twice."""
    step = max(1, PIECE // values.shape[1])
    for first in range(0, len(values), step):
        piece = torch.from_numpy(values[first : first + step]).to(there.device, non_blocking=True)
        there[first : first + len(piece)] = piece


def dense_sums(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of rows and of columns, float64."""
    if triton_runs_on(counts.device) and counts.dtype in (torch.uint8, torch.uint16):
        from paceline.workloads.topics.device.triton_calls import small_sums

        return small_sums(counts)
    per_term = torch.zeros(counts.shape[1], dtype=torch.float64, device=counts.device)
    per_document = []
    for piece in counts.split(max(1, PIECE // 8 // counts.shape[1])):
        exact = piece.double()
        per_document.append(exact.sum(1))
        per_term += exact.sum(0)
    return torch.cat(per_document), per_term


def sparse_sums(csr: Any, terms: int) -> tuple[Tensor, Tensor]:
    """Sums of rows and of columns, float64."""
    pointer, _, count = csr
    step, per_document = PIECE // 8, torch.zeros(len(pointer) - 1, dtype=torch.float64, device=count.device)
    for number, piece in enumerate(count.split(step)):
        running = torch.nn.functional.pad(piece.double().cumsum(0), (1, 0))
        per_document += running[(pointer - number * step).clamp_(0, len(piece))].diff()
    return per_document, sparse_term_sums(csr, terms)


def sparse_term_sums(csr: Any, terms: int) -> Tensor:
    """Sums of columns, float64."""
    _, index, count = csr
    per_term = torch.zeros(terms, dtype=torch.float64, device=index.device)
    for j, x in zip(index.split(PIECE // 8), count.split(PIECE // 8), strict=True):
        per_term.index_add_(0, j, x.double())
    return per_term
