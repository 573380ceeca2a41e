"""Matrices of counts, documents by terms, dense or sparse, in the smallest exact type."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import InvalidData

CHUNK = 1 << 16  # numbers looked at together: they stay in the cache between the cast and the comparison
LARGEST: dict[np.dtype, int] = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65_535, np.dtype(np.int32): 2**31 - 1}
WHOLE = tuple(LARGEST)
FRACTIONS = np.dtype(np.float32)
Locator = Callable[[int], str]  # names the number at a position, for messages: "counts.npy: document 3, term 5"


def make_row_locator(source: str, terms: int, first_row: int = 0) -> Locator:
    return lambda at: f"{source}: document {first_row + at // terms}, term {at % terms} (both from 0)"


def check_matrix(shape: Sequence[int], source: str, dtype: np.dtype | None = None) -> None:
    """Raise UserError if an array of this shape and type cannot be a matrix of counts."""
    problem = ""
    if dtype is not None and dtype.kind not in "buif":
        problem = f"holds values of type {dtype}; counts are whole numbers, of an int or float type"
    elif len(shape) != 2:
        problem = f"has the shape {tuple(shape)}; documents by terms are 2 dimensions"
    elif 0 in shape:
        problem = f"is empty, {shape[0]:,} documents by {shape[1]:,} terms; at least one of each"
    elif shape[1] > np.iinfo(np.int32).max:
        problem = f"has {shape[1]:,} terms; at most 2,147,483,647 are possible"
    if problem:
        raise InvalidData(f"{source}: {problem}")


def find_integer_type(largest: float) -> np.dtype | None:
    """Return the smallest type for whole numbers up to `largest`; None if none holds them."""
    return next((dtype for dtype, limit in LARGEST.items() if largest <= limit), None)


def shrink(counts: np.ndarray) -> np.ndarray:
    """Return whole numbers that are known to be counts in their smallest type."""
    return counts.astype(find_integer_type(counts.max(initial=0)) or np.int32)


def convert_to_smallest(array: np.ndarray, *, fractional: bool, place: Locator) -> np.ndarray:
    """Return the array in the smallest exact type, C-contiguous; not copied where it already is."""
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind in "ui" and array.size:
        kind = find_integer_type(array.max()) if array.min() >= 0 else None
        if kind is not None:
            return np.ascontiguousarray(array.astype(kind, copy=False))
    filling = WideningArray(array.size, fractional=fractional, place=place)
    rows = len(array) if array.flags.c_contiguous or array.ndim == 1 else (1 << 20) // max(1, array.shape[1])
    for start in range(0, len(array), max(1, rows)):
        filling.put(array[start : start + rows].ravel())
    return filling.values.reshape(array.shape)


class WideningArray:
    """An array that is filled from its start, and gets a wider type when a number needs it."""

    def __init__(self, size: int, *, fractional: bool, place: Locator):
        self.values, self.done = np.empty(size, np.uint8), 0
        self._fractional, self._place = fractional, place

    def put(self, numbers: np.ndarray) -> None:
        """Append flat numbers of any type; raise UserError for what cannot be a count."""
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, numbers.size, CHUNK):
                chunk = numbers[start : start + CHUNK]
                if not self._store_if_it_fits(chunk):
                    narrow, self.values = self.values, np.empty(self.values.size, self._find_type(chunk))
                    self.values[: self.done] = narrow[: self.done]
                    fits = self._store_if_it_fits(chunk)
                    assert fits, "the wider type does not hold the numbers either"
                self.done += chunk.size

    def _store_if_it_fits(self, chunk: np.ndarray) -> bool:
        target = self.values[self.done : self.done + chunk.size]
        limit = LARGEST.get(self.values.dtype)
        if limit is not None and chunk.dtype.kind in "uib" and (chunk.min() < 0 or chunk.max() > limit):
            return False
        np.copyto(target, chunk, casting="unsafe")
        if limit is None:  # float32
            return bool(target.min() >= 0 and target.max() < np.inf)
        if chunk.dtype.kind in "uib":
            return True
        return bool((target == chunk).all()) and (self.values.dtype != np.int32 or bool(chunk.min() >= 0))

    def _find_type(self, chunk: np.ndarray) -> np.dtype:
        if chunk.dtype.kind == "f":
            self._reject_counts(chunk, ~np.isfinite(chunk), "every count must be a finite number")
        self._reject_counts(chunk, chunk < 0, "a count cannot be negative")
        broken = chunk != np.trunc(chunk)
        if not self._fractional:
            self._reject_counts(
                chunk, broken, "counts are whole numbers; to allow fractions pass  fractional=True  (--fractional)"
            )
            self._reject_counts(chunk, chunk > LARGEST[np.dtype(np.int32)], "the largest count is 2,147,483,647")
        kind = None if broken.any() else find_integer_type(chunk.max())
        if kind is None:
            self._reject_counts(chunk, chunk > np.finfo(np.float32).max, "numbers up to 3.4e38 are possible")
            return FRACTIONS
        return np.promote_types(kind, self.values.dtype) if self.values.dtype != FRACTIONS else FRACTIONS

    def _reject_counts(self, chunk: np.ndarray, bad: np.ndarray, reason: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            raise InvalidData(f"{self._place(self.done + at)} is {float(chunk[at]):.12g}: {reason}")


@dataclass(frozen=True, eq=False)
class Csr:
    """The nonzeros of some rows. Those of row r are at indptr[r] : indptr[r + 1]."""

    indptr: np.ndarray  # int64, rows + 1, starts at 0
    indices: np.ndarray  # int32, the terms, ascending within a row
    data: np.ndarray  # uint8, uint16, int32 or float32; no zeros

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.indptr, self.indices, self.data

    @property
    def row_numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.indptr))

    def select(self, chosen: np.ndarray, data: np.ndarray) -> "Csr":
        before = np.concatenate(([0], np.cumsum(chosen, dtype=np.int64)))
        return Csr(before[self.indptr], self.indices[chosen], data[chosen])

    def slice_rows(self, start: int, stop: int) -> "Csr":
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
        return self.values.parts if isinstance(self.values, Csr) else (self.values,)

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


@dataclass(frozen=True, eq=False, kw_only=True)
class Counts:
    """Documents by terms. `resident`: a block costs next to nothing, again and again."""

    vocabulary: Sequence[str] | None = None
    names: Sequence[str] | None = None
    fractional: bool = False

    if TYPE_CHECKING:

        @property
        def documents(self) -> int: ...
        @property
        def terms(self) -> int: ...
        @property
        def sparse(self) -> bool: ...
        @property
        def resident(self) -> bool: ...
        @property
        def stored_bytes(self) -> int: ...

    def block(self, start: int, stop: int) -> DocumentBlock:
        raise NotImplementedError

    def weights(self) -> np.ndarray:
        """Return the work per document: its nonzeros where sparse, else the number of terms. int64."""
        return np.full(self.documents, self.terms, np.int64)


@dataclass(frozen=True, eq=False)
class DenseCounts(Counts):
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
class SparseCounts(Counts):
    values: Csr
    terms: int

    sparse = True
    resident = True

    @property
    def documents(self) -> int:
        return len(self.values)

    @property
    def stored_bytes(self) -> int:
        return sum(part.nbytes for part in self.values.parts)

    def block(self, start: int, stop: int) -> DocumentBlock:
        return DocumentBlock(start, self.values.slice_rows(start, stop))

    def weights(self) -> np.ndarray:
        return np.diff(self.values.indptr)


def iterate_overlaps(first_rows: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts with rows of start..stop, each with its range of them; parts begin at `first_rows`."""
    for number in range(int(np.searchsorted(first_rows, start, "right")) - 1, len(first_rows) - 1):
        begins, ends = int(first_rows[number]), int(first_rows[number + 1])
        if begins >= stop:
            return
        yield number, max(start - begins, 0), min(stop, ends) - begins


def join_rows(parts: Sequence[Csr]) -> Csr:
    if len(parts) == 1:
        return parts[0]
    lengths = [np.diff(part.indptr) for part in parts]
    indptr = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
    return Csr(indptr, np.concatenate([part.indices for part in parts]), stack_arrays([part.data for part in parts]))


def join_values(parts: Sequence[np.ndarray | Csr]) -> np.ndarray | Csr:
    """Join dense rows, or, if some of them are nonzeros, the nonzeros of all."""
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    return stack_arrays(dense) if len(dense) == len(parts) else join_rows([to_sparse(part) for part in parts])


def stack_arrays(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays in the widest of their types; beside fractions, large counts are float32 too."""
    if len(parts) == 1:
        return parts[0]
    fractions = any(part.dtype.kind == "f" for part in parts)
    return np.concatenate(parts, dtype=np.float32 if fractions else None, casting="unsafe")


def count_keys(keys: np.ndarray, rows: int, width: int) -> Csr:
    """Count occurrences, each given as  row * width + term; `keys` are sorted in place."""
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    number = np.diff(first, append=len(keys))
    keys = keys[first]
    starts = np.arange(rows + 1, dtype=np.int64) * width
    indptr = np.searchsorted(keys, starts).astype(np.int64)
    indices = (keys - np.repeat(starts[:-1], np.diff(indptr))).astype(np.int32)
    return Csr(indptr, indices, shrink(number))


def to_dense(values: np.ndarray | Csr, terms: int) -> np.ndarray:
    if not isinstance(values, Csr):
        return values
    dense = np.zeros((len(values), terms), values.data.dtype)
    dense.ravel()[values.row_numbers * terms + values.indices] = values.data
    return dense


def to_sparse(values: np.ndarray | Csr) -> Csr:
    if isinstance(values, Csr):
        return values
    rows, terms = values.shape
    nonzero = values.view(np.bool_) if values.dtype == np.uint8 else values != 0
    lengths = np.count_nonzero(nonzero, axis=1)
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    at = np.flatnonzero(nonzero)
    data = values.ravel()[at]
    at -= np.repeat(np.arange(rows, dtype=np.int64) * terms, lengths)
    return Csr(indptr, at.astype(np.int32), data)
