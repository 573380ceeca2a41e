"""Nonzeros found in rows while these are in the cache, compiled by numba. Import this only where numba is installed.

What is no count, or is larger than 65,535, is left to the slower ways of dtypes.py, which say why or make room.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import functools

import numpy as np
from numba import njit

from paceline.workloads.topics.counts.blocks import Csr
from paceline.workloads.topics.counts.dtypes import LARGEST as LARGEST_OF
from paceline.workloads.topics.counts.dtypes import whole_type

AT_ONCE = 8  # numbers that are passed over together where all are zero
LARGEST = LARGEST_OF[np.dtype(np.uint16)]
NOT_TAKEN = -1


def compiled(function=None, *, fastmath=True):
    """Compiled when it is first called, and kept on disk where there is a place for it."""
    if function is None:
        return functools.partial(compiled, fastmath=fastmath)
    options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return njit(**options)(function)


def can_scan(dtype: np.dtype) -> bool:
    """Types that numba compiles for."""
    return dtype.isnative and dtype.kind in "buif" and (dtype.kind != "f" or dtype.itemsize in (4, 8))


class Nonzeros:
    """Nonzeros of rows that are added from the first to the last; there is room for a given number of them."""

    def __init__(self, rows: int, room: int) -> None:
        self.indptr = np.zeros(rows + 1, np.int64)
        self.indices, self.data = np.empty(room + AT_ONCE, np.int32), np.empty(room + AT_ONCE, np.uint16)
        self.rows = self.count = 0

    def add(self, rows: np.ndarray) -> bool:
        """Whether they fit, and are small counts."""
        values = rows.view(np.uint8) if rows.dtype == np.bool_ else rows
        ends = self.indptr[self.rows + 1 : self.rows + 1 + len(rows)]
        found = _scan(values, values.view(f"u{values.itemsize}"), self.indices, self.data, self.count, ends)
        if found == NOT_TAKEN:
            return False
        self.rows, self.count = self.rows + len(rows), found
        return True

    def csr(self) -> Csr:
        data = self.data[: self.count]
        kind = whole_type(data.max(initial=0))
        return Csr(self.indptr, self.indices[: self.count].copy(), data.astype(kind))


@compiled(fastmath=False)  # numbers that are none must be seen
def _scan(values, bits, indices, data, count, ends):
    """Append the nonzeros of each row, and where they end; returns how many there are then, or NOT_TAKEN."""
    rows, terms = values.shape
    room = len(indices) - AT_ONCE
    for i in range(rows):
        row = values[i]
        odd = False
        for first in range(0, terms - AT_ONCE + 1, AT_ONCE):
            some = bits[i, first]
            for j in range(1, AT_ONCE):
                some |= bits[i, first + j]
            if some:
                for j in range(AT_ONCE):
                    whole, is_odd = _counted(row[first + j])
                    odd |= is_odd
                    indices[count], data[count] = first + j, whole
                    count += whole != 0
                if count > room:
                    return NOT_TAKEN
        for j in range(terms - terms % AT_ONCE, terms):
            whole, is_odd = _counted(row[j])
            odd |= is_odd
            indices[count], data[count] = j, whole
            count += whole != 0
        if odd or count > room:
            return NOT_TAKEN
        ends[i] = count
    return count


@compiled(fastmath=False)
def _counted(x):
    """The number as a small count, and whether it is none."""
    fits = x >= 0 and x <= LARGEST
    whole = np.uint16(x if fits else 0)
    return whole, not fits or whole != x
