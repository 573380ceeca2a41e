"""Documents by terms, handed out in blocks: dense rows, or their nonzeros.

Each block has the smallest type that holds its counts exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from paceline.workloads.topics.counts.dtypes import whole_type


@dataclass(frozen=True, eq=False)
class Csr:
    """The nonzeros of some rows. Those of row r are at indptr[r] : indptr[r + 1]."""

    indptr: np.ndarray  # int64, rows + 1, starts at 0
    indices: np.ndarray  # int32, the terms, ascending within a row
    data: np.ndarray  # uint8, uint16, int32 or float32; no zeros

    @property
    def rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.indptr, self.indices, self.data

    @property
    def row_numbers(self) -> np.ndarray:
        """The row of each nonzero."""
        return np.repeat(np.arange(self.rows, dtype=np.int64), np.diff(self.indptr))

    def only(self, there: np.ndarray, data: np.ndarray) -> Csr:
        """The nonzeros for which `there` holds, with counts of `data` in their place."""
        before = np.concatenate(([0], np.cumsum(there, dtype=np.int64)))
        return Csr(before[self.indptr], self.indices[there], data[there])

    def between(self, start: int, stop: int) -> Csr:
        """The rows start..stop; their nonzeros are not copied."""
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        indptr = self.indptr[start : stop + 1]
        return Csr(indptr - first if first else indptr, self.indices[first:last], self.data[first:last])


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Consecutive documents. Dense values are C-contiguous rows of uint8, uint16, int32 or float32."""

    start: int
    values: np.ndarray | Csr

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays that hold the values."""
        return self.values.parts if isinstance(self.values, Csr) else (self.values,)

    @property
    def counts(self) -> np.ndarray:
        """All counts, or those that are not zero."""
        return self.parts[-1]

    @property
    def stop(self) -> int:
        return self.start + (self.values.rows if isinstance(self.values, Csr) else len(self.values))


@runtime_checkable
class Counts(Protocol):
    """Documents by terms. `resident` means that a block costs next to nothing, again and again."""

    @property
    def documents(self) -> int: ...
    @property
    def terms(self) -> int: ...
    @property
    def sparse(self) -> bool: ...
    @property
    def resident(self) -> bool: ...
    @property
    def stored_bytes(self) -> int:
        """What one pass over all documents reads."""
        ...

    @property
    def vocabulary(self) -> Sequence[str] | None: ...
    @property
    def names(self) -> Sequence[str] | None: ...
    def block(self, start: int, stop: int) -> DocumentBlock: ...
    def weights(self) -> np.ndarray:
        """The work per document: its nonzeros where sparse, else the number of terms. int64."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled:
    """What counts of every kind carry: names of terms and documents, and whether counts need not be whole."""

    vocabulary: Sequence[str] | None = None
    names: Sequence[str] | None = None
    fractional: bool = False

    if TYPE_CHECKING:

        @property
        def documents(self) -> int: ...
        @property
        def terms(self) -> int: ...

    def weights(self) -> np.ndarray:
        """Of dense rows; sparse ones have their own."""
        return np.full(self.documents, self.terms, np.int64)


@dataclass(frozen=True, eq=False)
class DenseCounts(Labelled):
    """Rows in memory."""

    values: np.ndarray

    sparse = False
    resident = True

    @property
    def documents(self) -> int:
        return self.values.shape[0]

    @property
    def terms(self) -> int:
        return self.values.shape[1]

    @property
    def stored_bytes(self) -> int:
        return self.values.nbytes

    @property
    def row_bytes(self) -> int:
        return self.terms * self.values.itemsize

    def block(self, start: int, stop: int) -> DocumentBlock:
        return DocumentBlock(start, self.values[start:stop])


@dataclass(frozen=True, eq=False)
class SparseCounts(Labelled):
    """Nonzeros in memory, row by row."""

    values: Csr
    terms: int

    sparse = True
    resident = True

    @property
    def documents(self) -> int:
        return self.values.rows

    @property
    def stored_bytes(self) -> int:
        return sum(part.nbytes for part in self.values.parts)

    def block(self, start: int, stop: int) -> DocumentBlock:
        return DocumentBlock(start, self.values.between(start, stop))

    def weights(self) -> np.ndarray:
        return np.diff(self.values.indptr)


def allows_fractions(counts: Counts) -> bool:
    return bool(getattr(counts, "fractional", False))


def allowing_fractions(counts: Counts) -> Counts:
    """The same counts with fractions allowed, where they know of such a thing."""
    if allows_fractions(counts) or not hasattr(counts, "fractional"):
        return counts
    changeable: Any = counts
    return replace(changeable, fractional=True)


def no_rows(start: int, terms: int, sparse: bool) -> DocumentBlock:
    """A block without documents."""
    if not sparse:
        return DocumentBlock(start, np.empty((0, terms), np.uint8))
    return DocumentBlock(start, Csr(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8)))


def overlapping(first_rows: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The parts that the rows start..stop lie in, each with its own range of them; parts begin at `first_rows`."""
    for number in range(int(np.searchsorted(first_rows, start, "right")) - 1, len(first_rows) - 1):
        begins, ends = int(first_rows[number]), int(first_rows[number + 1])
        if begins >= stop:
            return
        yield number, max(start - begins, 0), min(stop, ends) - begins


def joined(parts: Sequence[Csr]) -> Csr:
    """Nonzeros of rows after rows."""
    if len(parts) == 1:
        return parts[0]
    lengths = [np.diff(part.indptr) for part in parts]
    indptr = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
    return Csr(indptr, np.concatenate([part.indices for part in parts]), stacked([part.data for part in parts]))


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays one after the other, in the widest of their types; beside fractions, large counts are float32 too."""
    if len(parts) == 1:
        return parts[0]
    fractions = any(part.dtype.kind == "f" for part in parts)
    return np.concatenate(parts, dtype=np.float32 if fractions else None, casting="unsafe")


def counted(keys: np.ndarray, rows: int, width: int) -> Csr:
    """Nonzeros of single occurrences, each given as  row * width + term; `keys` are sorted in place."""
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    number = np.diff(first, append=len(keys))
    keys = keys[first]
    starts = np.arange(rows + 1, dtype=np.int64) * width
    indptr = np.searchsorted(keys, starts).astype(np.int64)
    indices = (keys - np.repeat(starts[:-1], np.diff(indptr))).astype(np.int32)
    return Csr(indptr, indices, number.astype(whole_type(number.max(initial=0)) or np.int32))


def dense_rows(values: np.ndarray | Csr, terms: int) -> np.ndarray:
    """The rows with their zeros."""
    if not isinstance(values, Csr):
        return values
    dense = np.zeros((values.rows, terms), values.data.dtype)
    dense.ravel()[values.row_numbers * terms + values.indices] = values.data
    return dense


def sparse_rows(values: np.ndarray | Csr) -> Csr:
    """The nonzeros of the rows."""
    if isinstance(values, Csr):
        return values
    rows, terms = values.shape
    there = values.view(np.bool_) if values.dtype == np.uint8 else values != 0
    lengths = np.count_nonzero(there, axis=1)
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    at = np.flatnonzero(there)
    data = values.ravel()[at]
    at -= np.repeat(np.arange(rows, dtype=np.int64) * terms, lengths)
    return Csr(indptr, at.astype(np.int32), data)
