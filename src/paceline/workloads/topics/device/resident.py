"""Passes over counts that live on a device, their sums, and their loss in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.counts.on_device import PIECE, DeviceCounts
from paceline.workloads.topics.device.passes import pass_over
from paceline.workloads.topics.device.plain import DocumentPass, ReadPasses
from paceline.workloads.topics.device.tensors import dense_sums, sparse_sums, whole_tiles_bytes
from paceline.workloads.topics.device.tiers import free_device_bytes
from paceline.workloads.topics.sizes import SORT_BYTES

Tensor = Any  # torch.Tensor; torch is not typed here
TINIEST = float(np.finfo(np.float64).tiny)


def sums_of(counts: DeviceCounts) -> tuple[Tensor, Tensor]:
    """Per document and per term, float64, on the device."""
    return sparse_sums(counts.values, counts.terms) if counts.sparse else dense_sums(counts.values)


def passes_of(counts: DeviceCounts, per_document: Tensor, per_term: Tensor, share: Tensor) -> ReadPasses:
    """The passes over all documents, in one where what it needs fits beside them, else some at a time.

    That is a copy of dense counts in whole tiles, and the sort of sparse ones into the order of the terms.
    `per_term` are the sums of these documents, `share` the shares of the terms in all of them, on all ranks.
    """
    needed = SORT_BYTES * counts.stored_bytes if counts.sparse else whole_tiles_bytes(counts.values)
    if needed <= free_device_bytes(counts.device):
        whole = [(0, counts.documents, pass_over(counts.values, per_document, share, per_term))]
        return lambda: whole if counts.documents else []
    rows = max(1, min(counts.documents, free_device_bytes(counts.device) * counts.documents // needed) // 2)
    return lambda: _in_turn(counts, rows, per_document, share)


def minus_x_log_p(counts: DeviceCounts, L: np.ndarray, F: np.ndarray) -> float:
    """The sum of -x log p, in float64."""
    rows, topics = (torch.as_tensor(part, dtype=torch.float64, device=counts.device) for part in (L, F))
    total = torch.zeros((), dtype=torch.float64, device=counts.device)
    if not counts.sparse:
        step = max(1, PIECE // 4 // counts.terms)
        for x, some in zip(counts.values.split(step), rows.split(step), strict=True):
            total -= (x.double() * (some @ topics).clamp_min_(TINIEST).log_()).sum()
        return float(total)
    pointer, index, count = counts.values
    documents = torch.repeat_interleave(torch.arange(counts.documents, device=counts.device), pointer.diff())
    topics, step = topics.T.contiguous(), PIECE // 4 // len(topics)
    for i, j, x in zip(documents.split(step), index.split(step), count.split(step), strict=True):
        total -= x.double() @ (rows[i] * topics[j]).sum(1).clamp_min_(TINIEST).log_()
    return float(total)


def _in_turn(
    counts: DeviceCounts, rows: int, per_document: Tensor, share: Tensor
) -> Iterator[tuple[int, int, DocumentPass]]:
    for first in range(0, counts.documents, rows):
        last = min(counts.documents, first + rows)
        yield first, last, pass_over(counts.part(first, last).values, per_document[first:last], share)
