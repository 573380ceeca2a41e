"""Sums over documents and terms in one pass, which checks every number on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts, Csr, DocumentBlock, allowing_fractions, allows_fractions
from paceline.workloads.topics.counts.dtypes import smallest_exact
from paceline.workloads.topics.counts.stream import blocks

TOTALS_BLOCK_BYTES = 16 << 20
EXACT_COLUMNS = 1 << 14  # 255 x 2^14 is below 2^24: a float32 holds the sum of so many bytes exactly
EXACT_ROWS = 64


@dataclass(frozen=True)
class Totals:
    """Sums over a range of documents."""

    per_document: np.ndarray  # float64, of the range
    per_term: np.ndarray  # float64
    largest: float
    nonzeros: int


def totals(counts: Counts, start: int = 0, stop: int | None = None, *, fractional: bool = False) -> Totals:
    """One pass over the documents that adds up and refuses what is not a count.

    A matrix without any count is refused; a part of one is not.
    """
    stop = counts.documents if stop is None else stop
    allowed = fractional or allows_fractions(counts)
    if fractional:
        counts = allowing_fractions(counts)
    per_document = np.zeros(stop - start)
    per_term = np.zeros(counts.terms)
    largest, nonzeros = 0.0, 0
    for block in blocks(counts, start, stop, TOTALS_BLOCK_BYTES):
        _check_values(block, allowed)
        at = slice(block.start - start, block.stop - start)
        add: Any = _add_sparse if isinstance(block.values, Csr) else _add_dense
        nonzeros += add(block.values, per_document[at], per_term)
        largest = max(largest, float(block.counts.max(initial=0)))
    if not nonzeros and stop - start == counts.documents:
        raise UserError(
            f"all {counts.documents:,} x {counts.terms:,} counts are zero: there is nothing to learn; check the source"
        )
    return Totals(per_document, per_term, largest, nonzeros)


def _check_values(block: DocumentBlock, fractional: bool) -> None:
    """What our own readers never hand out, but another's might."""
    data = block.counts
    if data.dtype in (np.uint8, np.uint16) or not data.size or (data.dtype == np.int32 and data.min() >= 0):
        return
    if data.dtype == np.float32 and fractional and data.min() >= 0 and data.max() < np.inf:
        return
    smallest_exact(
        data, fractional=fractional, place=lambda at: f"the block of documents from {block.start}: number {at}"
    )


def _add_dense(values: np.ndarray, per_document: np.ndarray, per_term: np.ndarray) -> int:
    """Add the sums of rows and columns; how many are not zero. Bytes are summed as products with ones, in the cache."""
    rows, terms = values.shape
    if values.dtype != np.uint8:
        per_document += values.sum(axis=1, dtype=np.float64)
        per_term += values.sum(axis=0, dtype=np.float64)
        return int(np.count_nonzero(values))
    piece = np.empty((min(rows, EXACT_ROWS), min(terms, EXACT_COLUMNS)), np.float32)
    ones = np.ones(max(piece.shape), np.float32)
    for left in range(0, terms, EXACT_COLUMNS):
        right = min(terms, left + EXACT_COLUMNS)
        for top in range(0, rows, EXACT_ROWS):
            bottom = min(rows, top + EXACT_ROWS)
            part = piece[: bottom - top, : right - left]
            np.copyto(part, values[top:bottom, left:right])
            per_document[top:bottom] += part @ ones[: right - left]
            per_term[left:right] += ones[: bottom - top] @ part
    return int(np.count_nonzero(values.view(np.bool_)))


def _add_sparse(values: Csr, per_document: np.ndarray, per_term: np.ndarray) -> int:
    lengths = np.diff(values.indptr)
    some = lengths > 0
    if some.any():
        per_document[some] += np.add.reduceat(values.data, values.indptr[:-1][some], dtype=np.float64)
        per_term += np.bincount(values.indices, weights=values.data, minlength=len(per_term))
    return len(values.data)
