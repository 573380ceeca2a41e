"""Counts that stay on disk: rows of .npy files and row groups of Parquet files, read as they are needed."""

import math
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import invalid_format, unreadable_error
from paceline.data.npz import UNREADABLE
from paceline.data.tables import open_parquet
from paceline.errors import InvalidData, UserError
from paceline.io.files import open_regular
from paceline.workloads.topics.counts.arrays import from_scipy
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DenseCounts,
    DocumentBlock,
    WideningArray,
    check_matrix,
    convert_to_smallest,
    iterate_overlaps,
    join_rows,
    make_row_locator,
)
from paceline.workloads.topics.sizes import SPARSE_BELOW

AGAIN = "write it again or copy it again"
PIECE_BYTES = 1 << 20  # read and converted while it is in the cache
MAGIC = b"\x93NUMPY"


def read_npy(path: Path, fractional: bool = False) -> Counts:
    """Open counts on disk: header and size are checked now, the numbers when they are read."""
    shape, in_columns, dtype, offset = read_npy_header(path)
    check_matrix(shape, str(path), dtype)
    if in_columns and min(shape) > 1:
        warnings.warn(f"{path}: reading documents is slow in Fortran order; convert it once to shards", stacklevel=2)
        array = np.memmap(path, dtype, "r", offset, shape, "F")
        return MappedCounts(array, str(path), fractional=fractional)
    return NpyCounts(path, shape[0], shape[1], dtype, offset, fractional=fractional)


def read_npy_header(path: Path) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return (shape, Fortran order, type, offset of the numbers) of a .npy file that is as long as it claims."""
    try:
        with open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise invalid_format(f"{path}: not a .npy file; write it with  numpy.save")
            file.seek(0)
            first_version = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if first_version else np.lib.format.read_array_header_2_0
            shape, in_columns, dtype = read(file)
            offset = file.tell()
            size = os.fstat(file.fileno()).st_size
    except UserError:
        raise
    except OSError as error:
        raise unreadable_error(path, error) from None
    except UNREADABLE:
        raise damaged_error(path, "the header of the .npy file is damaged") from None
    needed = offset + dtype.itemsize * math.prod(shape)
    if size < needed and not dtype.hasobject:
        raise make_truncated_error(path, size, needed)
    return shape, in_columns, dtype, offset


def make_truncated_error(path: Path, size: int, needed: int) -> UserError:
    return damaged_error(path, f"the file is cut short, {size:,} of {needed:,} bytes")


def damaged_error(path: Path, problem: str, key: str = "") -> UserError:
    return UserError(f"{path}: {problem}; {AGAIN}", code="damaged", key=key)


@dataclass(frozen=True, eq=False)
class NpyCounts(Counts):
    """Rows one after the other in a file, read without mapping it: no pages stay in this process."""

    path: Path
    documents: int
    terms: int
    dtype: np.dtype
    offset: int

    sparse = False
    resident = False

    @property
    def stored_bytes(self) -> int:
        return self.documents * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.terms * self.dtype.itemsize

    def block(self, start: int, stop: int) -> DocumentBlock:
        begin = self.offset + start * self.row_bytes
        numbers = (stop - start) * self.terms
        with open_sequential(self.path) as handle:
            if self.dtype.itemsize == 1 and self.dtype.kind in "bu":
                flat = np.empty(numbers, np.uint8)
                read_array_into(handle, flat, begin, self.path)
            else:
                place = make_row_locator(str(self.path), self.terms, start)
                found = WideningArray(numbers, fractional=self.fractional, place=place)
                piece = np.empty(PIECE_BYTES // self.dtype.itemsize, self.dtype)
                for first in range(0, numbers, piece.size):
                    part = piece[: min(piece.size, numbers - first)]
                    read_array_into(handle, part, begin + first * self.dtype.itemsize, self.path)
                    found.put(part)
                flat = found.values
        return DocumentBlock(start, flat.reshape(stop - start, self.terms))

    def nonzero_rows(self, start: int, stop: int) -> Csr | None:
        """Return `block` without its zeros; None where these are few, or a number is not a small count."""
        from paceline.workloads.topics.counts.numba_kernels import NonzeroScanner

        if not self.dtype.isnative or (self.dtype.kind == "f" and self.dtype.itemsize not in (4, 8)):
            return None
        scanner = NonzeroScanner(stop - start, int(SPARSE_BELOW * (stop - start) * self.terms))
        piece = np.empty((max(1, PIECE_BYTES // self.row_bytes), self.terms), self.dtype)
        with open_sequential(self.path) as handle:
            for first in range(start, stop, len(piece)):
                rows = piece[: stop - first]
                read_array_into(handle, rows, self.offset + first * self.row_bytes, self.path)
                if not scanner.add(rows):
                    return None
        return scanner.csr()


@contextmanager
def open_sequential(path: Path) -> Iterator[int]:
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise unreadable_error(path, error) from None
    with file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield file.fileno()


def read_array_into(handle: int, array: np.ndarray, offset: int, path: Path) -> None:
    left = memoryview(array.data).cast("B") if array.size else memoryview(b"")
    while left.nbytes:
        try:
            got = os.preadv(handle, [left], offset)
        except OSError as error:
            raise unreadable_error(path, error) from None
        if not got:
            raise make_truncated_error(path, offset, offset + left.nbytes)
        left, offset = left[got:], offset + got


@dataclass(frozen=True, eq=False)
class MappedCounts(DenseCounts):
    """Rows of a mapped array of any order. Columns that are far apart make its rows slow to read."""

    source: str

    resident = False

    @property
    def row_bytes(self) -> int:
        return self.terms  # many rows at a time, since each column's are read together

    def block(self, start: int, stop: int) -> DocumentBlock:
        place = make_row_locator(self.source, self.terms, start)
        rows = np.ascontiguousarray(self.values[start:stop])
        return DocumentBlock(start, convert_to_smallest(rows, fractional=self.fractional, place=place))


INDICES, COUNTS = "indices", "counts"


def read_parquet_counts(path: Path, fractional: bool = False) -> Counts:
    """Open counts on disk: the list columns `indices` and `counts`."""
    lengths, largest = [], -1
    with open_parquet(path) as file:
        for number in range(file.metadata.num_row_groups):
            column = file.read_row_group(number, columns=[INDICES], use_threads=False).column(INDICES)
            some, indices = flatten_lists(column)
            lengths.append(some)
            largest = max(largest, int(indices.max(initial=-1)))
    groups = tuple(map(len, lengths))
    if largest < 0:
        raise InvalidData(f"{path}: {sum(groups):,} documents without a single count")
    terms, vocabulary = largest + 1, path.with_name("terms.txt")
    if vocabulary.is_file():  # terms at the end of the vocabulary may occur nowhere
        with vocabulary.open("rb") as lines:
            terms = max(terms, sum(1 for _ in lines))
    return ParquetCounts(path, terms, groups, np.concatenate(lengths), fractional=fractional)


@dataclass(frozen=True, eq=False)
class ParquetCounts(Counts):
    """Documents as rows of two list columns. The row group that was read last is kept."""

    path: Path
    terms: int
    groups: tuple[int, ...]  # rows of each
    lengths: np.ndarray
    kept: dict[int, Csr] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    sparse = True
    resident = False

    @property
    def documents(self) -> int:
        return sum(self.groups)

    @property
    def stored_bytes(self) -> int:
        return self.path.stat().st_size

    def weights(self) -> np.ndarray:
        return self.lengths

    def block(self, start: int, stop: int) -> DocumentBlock:
        parts = iterate_overlaps(self._first_rows, start, stop)
        return DocumentBlock(start, join_rows([self._load_group(number).slice_rows(*rows) for number, *rows in parts]))

    @cached_property
    def _first_rows(self) -> np.ndarray:
        return np.cumsum([0, *self.groups])

    def _load_group(self, number: int) -> Csr:
        with self.lock:
            if number not in self.kept:
                self.kept.clear()
                self.kept[number] = self._read_row_group(number)
            return self.kept[number]

    def _read_row_group(self, number: int) -> Csr:
        import scipy.sparse

        with open_parquet(self.path) as file:
            table = file.read_row_group(number, columns=[INDICES, COUNTS], use_threads=False)
        lengths, indices = flatten_lists(table.column(INDICES))
        others, data = flatten_lists(table.column(COUNTS))
        if not np.array_equal(lengths, others):
            row = int(self._first_rows[number]) + int((lengths != others).argmax())
            raise InvalidData(f"{self.path}: document {row} has not as many {COUNTS} as {INDICES}")
        if len(indices) and indices.min() < 0:
            raise InvalidData(f"{self.path}: row group {number} has a negative term")
        indptr = np.concatenate(([0], np.cumsum(lengths)))
        rows = scipy.sparse.csr_array((data, indices, indptr), shape=(len(lengths), self.terms))
        source = f"{self.path} row group {number}"
        return from_scipy(rows, fractional=self.fractional, source=source).values


def has_count_columns(path: Path) -> bool:
    with open_parquet(path) as file:
        return {INDICES, COUNTS} <= set(file.schema_arrow.names)


def flatten_lists(column: Any) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow
    import pyarrow.compute

    is_list = isinstance(column.type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType)
    numbers = pyarrow.compute.list_flatten(column) if is_list else None
    if numbers is None or numbers.null_count:
        found = "null" if is_list else column.type
        raise InvalidData(f"the columns {INDICES!r} and {COUNTS!r} hold {found}; lists of numbers are needed")
    lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0).to_numpy()
    return lengths.astype(np.int64), numbers.to_numpy()
