"""Iterate over blocks of documents, reading ahead of the consumer, and sum them up."""

from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from paceline.workloads.topics.counts.matrices import Counts, Csr, DocumentBlock, to_sparse
from paceline.workloads.topics.sizes import CORE_BLOCK_BYTES, SPARSE_BELOW

BYTES_PER_NONZERO = 8  # an int32 term and at most four bytes of count
MAX_FAILED_SCANS = 2  # blocks in a row that had too few zeros: no more are scanned in that pass
Read = Callable[[int, int], DocumentBlock]
TOTALS_BLOCK_BYTES = 16 << 20


def iterate_blocks(
    counts: Counts,
    start: int = 0,
    stop: int | None = None,
    block_bytes: int = CORE_BLOCK_BYTES,
    *,
    without_zeros: bool = False,
) -> Iterator[DocumentBlock]:
    """Yield the documents start..stop in order, in blocks of at most about `block_bytes` (one document at least).

    A thread reads ahead what is on disk. `without_zeros`: rows of mostly zeros come as nonzeros.
    """
    ranges = split_ranges(counts, start, counts.documents if stop is None else stop, block_bytes)
    read = _make_scanning_reader(counts) if without_zeros else counts.block
    if counts.resident or len(ranges) < 2:
        return starmap(read, ranges)
    from paceline.data.prefetch import map_in_order

    return map_in_order(lambda some: read(*some), ranges, threads=1)


def _make_scanning_reader(counts: Any) -> Read:
    """Return a reader that looks for nonzeros as it reads, until two blocks in a row have too few zeros."""
    failed = 0 if hasattr(counts, "nonzero_rows") else MAX_FAILED_SCANS

    def read(first: int, last: int) -> DocumentBlock:
        nonlocal failed
        if failed < MAX_FAILED_SCANS:
            found = counts.nonzero_rows(first, last)
            if found is not None:
                failed = 0
                return DocumentBlock(first, found)
            failed += 1
        return drop_zeros_if_sparse(counts.block(first, last))

    return read


def drop_zeros_if_sparse(block: DocumentBlock) -> DocumentBlock:
    """Return the same documents, as their nonzeros where most counts are zero."""
    values = block.values
    if isinstance(values, Csr):
        return block
    nonzero = values.view(np.bool_) if values.dtype == np.uint8 else values
    few = np.count_nonzero(nonzero) <= SPARSE_BELOW * values.size
    return DocumentBlock(block.start, to_sparse(values)) if few else block


def split_ranges(counts: Counts, start: int, stop: int, block_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of documents of `iterate_blocks`: the same at every pass."""
    assert 0 <= start <= stop <= counts.documents
    if counts.sparse:
        ends = np.cumsum(counts.weights()[start:stop] * BYTES_PER_NONZERO + 8)
        return cut_by_size(ends, block_bytes, start)
    rows = max(1, block_bytes // getattr(counts, "row_bytes", 4 * counts.terms))
    return [(first, min(stop, first + rows)) for first in range(start, stop, rows)]


def cut_by_size(ends: np.ndarray, most: int, start: int = 0) -> list[tuple[int, int]]:
    """Return ranges of documents, the first numbered `start`: as many as fit into `most`, or one that is larger.

    `ends` are running sums of the documents' sizes.
    """
    ranges = []
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + most, "right")))
        ranges.append((start + first, start + last))
        first, before = last, int(ends[last - 1])
    return ranges


class Totals(NamedTuple):
    per_document: np.ndarray  # float64, of a range of documents
    per_term: np.ndarray  # float64, over these documents


def compute_totals(counts: Counts, start: int = 0, stop: int | None = None) -> Totals:
    """Sum the documents in one pass."""
    stop = counts.documents if stop is None else stop
    per_document, per_term = np.zeros(stop - start), np.zeros(counts.terms)
    for block in iterate_blocks(counts, start, stop, TOTALS_BLOCK_BYTES):
        values, own = block.values, per_document[block.start - start : block.stop - start]
        if not isinstance(values, Csr):
            kind = np.float64 if values.dtype.kind == "f" else np.int64
            own += values.sum(axis=1, dtype=kind)
            per_term += values.sum(axis=0, dtype=kind)
        elif (some := np.diff(values.indptr) > 0).any():
            own[some] += np.add.reduceat(values.data, values.indptr[:-1][some], dtype=np.float64)
            per_term += np.bincount(values.indices, weights=values.data, minlength=len(per_term))
    return Totals(per_document, per_term)
