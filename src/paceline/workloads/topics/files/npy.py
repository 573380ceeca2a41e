"""A .npy file as counts on disk: rows are read as they are asked for, into the smallest exact type."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.npz_file import UNREADABLE
from paceline.errors import UserError
from paceline.plain_files import open_plain
from paceline.record.units import size
from paceline.workloads.topics.counts import dtypes
from paceline.workloads.topics.counts.blocks import Counts, Csr, DenseCounts, DocumentBlock, Labelled
from paceline.workloads.topics.sizes import SPARSE_BELOW

PIECE_BYTES = 1 << 20  # read and converted while it is in the cache
TOUCHED_BYTES = 64 << 20  # of a mapped file, before its pages are handed back
FAULT_BYTES = 128 << 10  # what the kernel maps around a page that is touched, at both ends of a column
MAGIC = b"\x93NUMPY"


def read_npy(path: Path, fractional: bool = False) -> Counts:
    """Counts on disk. The header and the size of the file are checked now, the numbers when they are read."""
    shape, in_columns, dtype, offset = read_header(path)
    dtypes.check_dtype(dtype, str(path))
    dtypes.check_shape(shape, str(path))
    if in_columns and min(shape) > 1:
        warnings.warn(
            f"{path}: stored column by column (Fortran order), so that reading documents is slow; convert it once to "
            "shards, or store it with  numpy.save(PATH, numpy.ascontiguousarray(X))",
            stacklevel=2,
        )
        array = np.memmap(path, dtype, "r", offset, shape, "F")
        return MappedCounts(array, str(path), fractional=fractional)
    return NpyCounts(path, shape[0], shape[1], dtype, offset, fractional=fractional)


def read_header(path: Path) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, Fortran order, type, where the numbers begin) of a .npy file that is as long as it says."""
    try:
        with open_plain(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UserError(f"{path}: not a .npy file (it does not begin like one); write it with  numpy.save")
            file.seek(0)
            first_version = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if first_version else np.lib.format.read_array_header_2_0
            shape, in_columns, dtype = read(file)
            offset = file.tell()
            there = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except UNREADABLE:
        raise UserError(f"{path}: the header of the .npy file is damaged; write it again or copy it again") from None
    needed = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if there < needed and not dtype.hasobject:
        raise truncated(path, there, needed)
    return shape, in_columns, dtype, offset


def truncated(path: Path, there: int, needed: int) -> UserError:
    return UserError(
        f"{path}: the file is cut short, {there:,} of {needed:,} bytes ({size(needed - there)} are missing); "
        "write it again or copy it again"
    )


@dataclass(frozen=True, eq=False)
class NpyCounts(Labelled):
    """Rows one after the other in a file. They are read with plain reads, which leave no pages in this process."""

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
        with open_in_order(self.path) as handle:
            if self.dtype.itemsize == 1 and self.dtype.kind in "bu":
                flat = np.empty(numbers, np.uint8)
                read_into(handle, flat, begin, self.path)
            else:
                flat = self._smallest_exact(handle, begin, numbers, start)
        return DocumentBlock(start, flat.reshape(stop - start, self.terms))

    def nonzero_rows(self, start: int, stop: int) -> Csr | None:
        """What `block` has without its zeros; None where these are few, or a number is not a small count."""
        from paceline.workloads.topics.counts.scan import Nonzeros, can_scan

        if not can_scan(self.dtype):
            return None
        found = Nonzeros(stop - start, int(SPARSE_BELOW * (stop - start) * self.terms))
        piece = np.empty((max(1, PIECE_BYTES // self.row_bytes), self.terms), self.dtype)
        with open_in_order(self.path) as handle:
            for first in range(start, stop, len(piece)):
                rows = piece[: stop - first]
                read_into(handle, rows, self.offset + first * self.row_bytes, self.path)
                if not found.add(rows):
                    return None
        return found.csr()

    def _smallest_exact(self, handle: int, begin: int, numbers: int, start: int) -> np.ndarray:
        place = dtypes.place_in_rows(str(self.path), self.terms, start)
        filling = dtypes.Filling(numbers, fractional=self.fractional, place=place)
        piece = np.empty(PIECE_BYTES // self.dtype.itemsize, self.dtype)
        for first in range(0, numbers, piece.size):
            part = piece[: min(piece.size, numbers - first)]
            read_into(handle, part, begin + first * self.dtype.itemsize, self.path)
            filling.put(part)
        return filling.values


@contextmanager
def open_in_order(path: Path) -> Iterator[int]:
    """A file handle whose reads the kernel runs far ahead of."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield handle
    finally:
        os.close(handle)


def read_into(handle: int, array: np.ndarray, offset: int, path: Path) -> None:
    """Fill a contiguous array from the file at this offset."""
    left = memoryview(array.data).cast("B") if array.size else memoryview(b"")
    while left.nbytes:
        try:
            got = os.preadv(handle, [left], offset)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if not got:
            raise truncated(path, offset, offset + left.nbytes)
        left, offset = left[got:], offset + got


@dataclass(frozen=True, eq=False)
class MappedCounts(DenseCounts):
    """Rows of a mapped array of any order. Columns that are far apart make its rows slow, but not wrong."""

    source: str

    resident = False

    @property
    def row_bytes(self) -> int:
        return self.terms  # many rows at a time, since each column's are read together

    def block(self, start: int, stop: int) -> DocumentBlock:
        found = np.empty((stop - start, self.terms), np.uint8)
        column_bytes = (stop - start) * self.values.itemsize + FAULT_BYTES
        width = max(1, TOUCHED_BYTES // column_bytes)
        for left in range(0, self.terms, width):
            panel = np.array(self.values[start:stop, left : left + width], order="C")
            self._let_go()
            columns = slice(left, left + panel.shape[1])
            place = self._place(start, left, panel.shape[1])
            small = dtypes.smallest_exact(panel, fractional=self.fractional, place=place)
            kind = np.dtype(np.float32) if small.dtype.kind == "f" else np.promote_types(small.dtype, found.dtype)
            if found.dtype.kind != "f" and kind != found.dtype:
                found = found.astype(kind)
            found[:, columns] = small
        return DocumentBlock(start, found)

    def _place(self, start: int, left: int, width: int) -> dtypes.PlaceName:
        return lambda at: f"{self.source}: document {start + at // width}, term {left + at % width} (both from 0)"

    def _let_go(self) -> None:
        """Pages that were touched count as memory of this process until they are handed back.

        Not those of a private copy: what was changed there is nowhere else.
        """
        if getattr(self.values, "mode", "c") == "c":
            return
        base: Any = self.values
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
            base.madvise(mmap.MADV_DONTNEED)
