"""Blocks of documents one after the other, the next ones read while this one is worked on; and their sums."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DocumentBlock,
    allow_fractions,
    convert_to_smallest,
    is_fractional,
    to_sparse,
)
from paceline.workloads.topics.sizes import CORE_BLOCK_BYTES, READ_AHEAD, SPARSE_BELOW

BYTES_PER_NONZERO = 8  # an int32 term and at most four bytes of count
MAX_FAILED_SCANS = 2  # blocks in a row that were scanned for nothing: it is not tried again in that pass
Read = Callable[[int, int], DocumentBlock]
TOTALS_BLOCK_BYTES = 16 << 20
EXACT_COLUMNS = 1 << 14  # 255 x 2^14 is below 2^24: a float32 holds the sum of so many bytes exactly
EXACT_ROWS = 64


@runtime_checkable
class ScansNonzeros(Protocol):
    """Counts that find nonzeros while they read rows."""

    def nonzero_rows(self, start: int, stop: int) -> Csr | None: ...


def can_find_nonzeros(counts: Counts) -> bool:
    return isinstance(counts, ScansNonzeros) and has_numba()


def has_numba() -> bool:
    """It comes with the package, except where there is none for the machine or its Python."""
    return importlib.util.find_spec("numba") is not None


def iterate_blocks(
    counts: Counts,
    start: int = 0,
    stop: int | None = None,
    block_bytes: int = CORE_BLOCK_BYTES,
    *,
    without_zeros: bool = False,
) -> Iterator[DocumentBlock]:
    """The documents start..stop in order, in blocks of at most about `block_bytes` (one document at least).

    What is on disk is read by a thread that is READ_AHEAD blocks ahead: memory holds two more at most. An error
    of the thread is raised here. The thread ends when the iterator does, however early. `without_zeros`: rows that are
    mostly zeros come as their nonzeros, over which a compiled pass is many times as fast.
    """
    ranges = split_ranges(counts, start, counts.documents if stop is None else stop, block_bytes)
    read = _scanning(counts) if without_zeros and has_numba() else counts.block
    if counts.resident or len(ranges) < 2:
        return (read(first, last) for first, last in ranges)
    return _read_ahead(read, ranges)


def _scanning(counts: Counts) -> Read:
    """Scanned where that can be; what the scan does not take is read again as it is."""
    in_vain = 0

    def read(first: int, last: int) -> DocumentBlock:
        nonlocal in_vain
        if isinstance(counts, ScansNonzeros) and in_vain < MAX_FAILED_SCANS:
            found = counts.nonzero_rows(first, last)
            if found is not None:
                in_vain = 0
                return DocumentBlock(first, found)
            in_vain += 1
        return drop_zeros_if_sparse(counts.block(first, last))

    return read


def drop_zeros_if_sparse(block: DocumentBlock) -> DocumentBlock:
    """The same documents, as their nonzeros where most counts are zero."""
    values = block.values
    if isinstance(values, Csr):
        return block
    there = values.view(np.bool_) if values.dtype == np.uint8 else values
    few = np.count_nonzero(there) <= SPARSE_BELOW * values.size
    return DocumentBlock(block.start, to_sparse(values)) if few else block


def split_ranges(counts: Counts, start: int, stop: int, block_bytes: int) -> list[tuple[int, int]]:
    """The ranges of documents that `blocks` hands out: the same at every pass."""
    if not 0 <= start <= stop <= counts.documents:
        raise ValueError(f"documents {start} to {stop} of {counts.documents}")
    if counts.sparse:
        ends = np.cumsum(counts.weights()[start:stop] * BYTES_PER_NONZERO + 8)
        return cut_by_size(ends, block_bytes, start)
    row_bytes = getattr(counts, "row_bytes", 4 * counts.terms)
    rows = max(1, block_bytes // row_bytes)
    return [(first, min(stop, first + rows)) for first in range(start, stop, rows)]


def cut_by_size(ends: np.ndarray, most: int, start: int = 0) -> list[tuple[int, int]]:
    """Ranges of documents, the first numbered `start`: as many as fit into `most`, or one that is larger.

    `ends` are running sums of the documents' sizes.
    """
    ranges = []
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + most, "right")))
        ranges.append((start + first, start + last))
        first, before = last, int(ends[last - 1])
    return ranges


def _read_ahead(read: Read, ranges: list[tuple[int, int]]) -> Iterator[DocumentBlock]:
    reader = ThreadPoolExecutor(1, thread_name_prefix="paceline-topics-reader")
    try:
        coming = deque(reader.submit(read, *some) for some in ranges[: READ_AHEAD + 1])
        rest = iter(ranges[READ_AHEAD + 1 :])
        while coming:
            block = coming.popleft().result()
            coming.extend(reader.submit(read, *some) for some in islice(rest, 1))
            yield block
            del block  # the consumer's block is not kept alive while waiting for the next
    finally:
        reader.shutdown(cancel_futures=True)


class Totals(NamedTuple):
    per_document: np.ndarray  # float64, of a range of documents
    per_term: np.ndarray  # float64, over these documents


def compute_totals(counts: Counts, start: int = 0, stop: int | None = None, *, fractional: bool = False) -> Totals:
    """One pass over the documents that adds up and refuses what is not a count.

    A matrix without any count is refused; a part of one is not.
    """
    stop = counts.documents if stop is None else stop
    allowed = fractional or is_fractional(counts)
    if fractional:
        counts = allow_fractions(counts)
    per_document, per_term = np.zeros(stop - start), np.zeros(counts.terms)
    for block in iterate_blocks(counts, start, stop, TOTALS_BLOCK_BYTES):
        _check_values(block, allowed)
        at = slice(block.start - start, block.stop - start)
        add: Any = _add_sparse if isinstance(block.values, Csr) else _add_dense
        add(block.values, per_document[at], per_term)
    if not per_term.any() and stop - start == counts.documents:
        raise UserError(
            f"all {counts.documents:,} x {counts.terms:,} counts are zero: there is nothing to learn; check the source"
        )
    return Totals(per_document, per_term)


def _check_values(block: DocumentBlock, fractional: bool) -> None:
    """What our own readers never hand out, but another's might."""
    data = block.counts
    if data.dtype in (np.uint8, np.uint16) or not data.size or (data.dtype == np.int32 and data.min() >= 0):
        return
    if data.dtype == np.float32 and fractional and data.min() >= 0 and data.max() < np.inf:
        return
    where = f"the block of documents from {block.start}"
    convert_to_smallest(data, fractional=fractional, place=lambda at: f"{where}: number {at}")


def _add_dense(values: np.ndarray, per_document: np.ndarray, per_term: np.ndarray) -> None:
    """Add the sums of rows and columns. Bytes are summed as products with ones, in the cache."""
    rows, terms = values.shape
    if values.dtype != np.uint8:
        per_document += values.sum(axis=1, dtype=np.float64)
        per_term += values.sum(axis=0, dtype=np.float64)
        return
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


def _add_sparse(values: Csr, per_document: np.ndarray, per_term: np.ndarray) -> None:
    lengths = np.diff(values.indptr)
    some = lengths > 0
    if some.any():
        per_document[some] += np.add.reduceat(values.data, values.indptr[:-1][some], dtype=np.float64)
        per_term += np.bincount(values.indices, weights=values.data, minlength=len(per_term))
