"""Blocks of documents one after the other, the next ones read while this one is worked on."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from paceline.workloads.topics.counts.blocks import Counts, Csr, DocumentBlock, sparse_rows
from paceline.workloads.topics.sizes import CORE_BLOCK_BYTES, READ_AHEAD, SPARSE_BELOW

BYTES_PER_NONZERO = 8  # an int32 term and at most four bytes of count
IN_VAIN = 2  # blocks in a row that were scanned for nothing: it is not tried again in that pass
Read = Callable[[int, int], DocumentBlock]


@runtime_checkable
class Scanned(Protocol):
    """Counts that find nonzeros while they read rows."""

    def nonzero_rows(self, start: int, stop: int) -> Csr | None: ...


def scans(counts: Counts) -> bool:
    return isinstance(counts, Scanned) and _has_numba()


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def blocks(
    counts: Counts,
    start: int = 0,
    stop: int | None = None,
    block_bytes: int = CORE_BLOCK_BYTES,
    ahead: int = READ_AHEAD,
    *,
    without_zeros: bool = False,
) -> Iterator[DocumentBlock]:
    """The documents start..stop in order, in blocks of at most about `block_bytes` (one document at least).

    What is on disk is read by a thread that is `ahead` blocks ahead: memory holds `ahead` + 2 blocks at most. An error
    of the thread is raised here. The thread ends when the iterator does, however early. `without_zeros`: rows that are
    mostly zeros come as their nonzeros, over which a pass is many times as fast, if numba is there for it.
    """
    ranges = cuts(counts, start, counts.documents if stop is None else stop, block_bytes)
    read = _without_zeros(counts) if without_zeros and _has_numba() else counts.block
    if counts.resident or ahead < 1 or len(ranges) < 2:
        return (read(first, last) for first, last in ranges)
    return _read_ahead(read, ranges, ahead)


def _without_zeros(counts: Counts) -> Read:
    """Scanned where that can be; what the scan does not take is read again as it is."""
    in_vain = 0

    def read(first: int, last: int) -> DocumentBlock:
        nonlocal in_vain
        if isinstance(counts, Scanned) and in_vain < IN_VAIN:
            found = counts.nonzero_rows(first, last)
            if found is not None:
                in_vain = 0
                return DocumentBlock(first, found)
            in_vain += 1
        return _if_few(counts.block(first, last))

    return read


def _if_few(block: DocumentBlock) -> DocumentBlock:
    values = block.values
    if isinstance(values, Csr):
        return block
    there = values.view(np.bool_) if values.dtype == np.uint8 else values
    few = np.count_nonzero(there) <= SPARSE_BELOW * values.size
    return DocumentBlock(block.start, sparse_rows(values)) if few else block


def cuts(counts: Counts, start: int, stop: int, block_bytes: int) -> list[tuple[int, int]]:
    """The ranges of documents that `blocks` hands out: the same at every pass."""
    if not 0 <= start <= stop <= counts.documents:
        raise ValueError(f"documents {start} to {stop} of {counts.documents}")
    if counts.sparse:
        ends = np.cumsum(counts.weights()[start:stop] * BYTES_PER_NONZERO + 8)
        return _cut_by_bytes(ends, start, block_bytes)
    row_bytes = getattr(counts, "row_bytes", 4 * counts.terms)
    rows = max(1, block_bytes // row_bytes)
    return [(first, min(stop, first + rows)) for first in range(start, stop, rows)]


def _cut_by_bytes(ends: np.ndarray, start: int, block_bytes: int) -> list[tuple[int, int]]:
    """`ends` are running sums of bytes: as many documents as fit, or one that is larger than a block."""
    ranges = []
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + block_bytes, "right")))
        ranges.append((start + first, start + last))
        first, before = last, int(ends[last - 1])
    return ranges


def _read_ahead(read: Read, ranges: list[tuple[int, int]], ahead: int) -> Iterator[DocumentBlock]:
    reader = ThreadPoolExecutor(1, thread_name_prefix="paceline-topics-reader")
    try:
        coming = deque(reader.submit(read, *some) for some in ranges[: ahead + 1])
        rest = iter(ranges[ahead + 1 :])
        while coming:
            block = coming.popleft().result()
            coming.extend(reader.submit(read, *some) for some in islice(rest, 1))
            yield block
            del block  # the consumer's block is not kept alive while waiting for the next
    finally:
        reader.shutdown(cancel_futures=True)
