"""One shard: some documents as one binary file, little-endian, without padding.

| layout | sections, in this order |
|---|---|
| csr | starts: uint32, rows x segments + 1; large_at: uint32; large: int32; index: nonzeros; data: nonzeros |
| dense | large_at: uint32; large: int32; data: rows x terms |

Terms are divided into segments of 65,536, so that an index within one takes two bytes; `starts` are where the
nonzeros of a row in a segment begin. Where segments take more room than they save, there is one, and the index is an
int32. Counts too large for the type of `data` are 0 there, and listed apart: position in `data`, and value.
"""

import os
import zlib
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import (
    FRACTIONS,
    LARGEST,
    WHOLE,
    Csr,
    find_integer_type,
    to_dense,
    to_sparse,
)
from paceline.workloads.topics.files.disk_counts import open_sequential, read_array_into

SEGMENT_TERMS = 1 << 16
RARE = 16  # a wider type is taken when more than one count in so many needs it
AGAIN = "convert the source again or copy the folder again"
Size = Annotated[int, Field(ge=0, lt=2**40)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Shard:
    """The entry of one file in counts.json."""

    file: Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]  # in the same folder
    rows: Size
    nonzeros: Size
    layout: Literal["csr", "dense"]
    index: Literal["uint16", "int32"]  # type of the index
    segments: Annotated[int, Field(gt=0, lt=2**40)]
    data: Literal["uint8", "uint16", "int32", "float32"]  # type of the counts
    large: Size  # how many counts are stored apart
    largest: float
    bytes: Size
    crc32: str

    def section(self, terms: int) -> dict[str, tuple[int, np.dtype, int]]:
        entries = self.nonzeros if self.layout == "csr" else self.rows * terms
        sizes = [("large_at", "<u4", self.large), ("large", "<i4", self.large)]
        if self.layout == "csr":
            sizes = [("starts", "<u4", self.rows * self.segments + 1), *sizes, ("index", self.index, entries)]
        sizes.append(("data", self.data, entries))
        sections, offset = {}, 0
        for name, kind, many in sizes:
            dtype = np.dtype(kind).newbyteorder("<")
            sections[name] = (offset, dtype, many)
            offset += dtype.itemsize * many
        return sections

    def expected_bytes(self, terms: int) -> int:
        offset, dtype, many = self.section(terms)["data"]
        return offset + dtype.itemsize * many


def write_shard(path: Path, values: np.ndarray | Csr, terms: int) -> Shard:
    rows = values.rows if isinstance(values, Csr) else len(values)
    counts = values.data if isinstance(values, Csr) else values[values != 0]
    nonzeros, data = len(counts), _choose_type(counts)
    segments, index_bytes = -(-terms // SEGMENT_TERMS), 2
    if 4 * rows * segments + 2 * nonzeros > 4 * rows + 4 * nonzeros:
        segments, index_bytes = 1, 4
    csr_bytes = 4 * (rows * segments + 1) + nonzeros * (index_bytes + data.itemsize)
    layout = "csr" if csr_bytes < rows * terms * data.itemsize else "dense"
    values = to_sparse(values) if layout == "csr" else to_dense(values, terms)
    flat = values.data if isinstance(values, Csr) else values.ravel()
    assert flat.size < 2**32, "positions in a shard are uint32"
    small, large_at, large = _split_large(flat, data)
    arrays = [large_at, large, small]
    if isinstance(values, Csr):
        starts, index = _to_segments(values, segments, index_bytes)
        arrays = [starts, large_at, large, index, small]
    crc, total = 0, 0
    with path.open("xb") as file:
        for array in arrays:
            crc = _write_array(file, array, crc)
            total += array.nbytes
        file.flush()
        os.fsync(file.fileno())
    index_type = "uint16" if index_bytes == 2 else "int32"
    largest = float(flat.max(initial=0))
    facts: Any = (rows, nonzeros, layout, index_type, segments, data.name, len(large), largest, total, f"{crc:08x}")
    return Shard(path.name, *facts)


def read_shard_rows(path: Path, shard: Shard, terms: int, start: int, stop: int) -> np.ndarray | Csr:
    sections = shard.section(terms)
    with open_sequential(path) as handle:

        def part(name: str, first: int, last: int) -> np.ndarray:
            offset, dtype, _ = sections[name]
            array = np.empty(last - first, dtype)
            read_array_into(handle, array, offset + first * dtype.itemsize, path)
            return array

        large_at, large = part("large_at", 0, shard.large), part("large", 0, shard.large)
        if (large_at[1:] < large_at[:-1]).any() or (large < 0).any():
            raise _damaged_shard_error(path, "its large counts are not in order")
        if shard.layout == "dense":
            first, last = start * terms, stop * terms
            flat = _restore_large_counts(part("data", first, last), large_at, large, first)
            return flat.reshape(stop - start, terms)
        starts = part("starts", start * shard.segments, stop * shard.segments + 1)
        first, last = int(starts[0]), int(starts[-1])
        if last > shard.nonzeros or (starts[1:] < starts[:-1]).any():
            raise _damaged_shard_error(path, "its rows and its nonzeros do not agree")
        index = part("index", first, last)
        data = _restore_large_counts(part("data", first, last), large_at, large, first)
        found = _from_segments(starts, index, data, shard.segments)
        if found.indices.size and not 0 <= int(found.indices.min()) <= int(found.indices.max()) < terms:
            raise _damaged_shard_error(path, f"it has a term beyond its {terms:,} terms")
        return found


def _damaged_shard_error(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: the file is damaged: {reason}; {AGAIN}", code="damaged", key=path.name)


def read_row_starts(path: Path, shard: Shard, terms: int) -> np.ndarray:
    offset, dtype, many = shard.section(terms)["starts"]
    starts = np.empty(many, dtype)
    with open_sequential(path) as handle:
        read_array_into(handle, starts, offset, path)
    return starts[:: shard.segments].astype(np.int64)


def verify_crc32(path: Path, crc32: str) -> None:
    if (found := compute_crc32(path)) != crc32:
        raise _damaged_shard_error(path, f"its checksum is {found}, not {crc32}")


def compute_crc32(path: Path) -> str:
    crc, piece = 0, bytearray(1 << 20)
    try:
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(piece):
                crc = zlib.crc32(memoryview(piece)[:got], crc)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {AGAIN}", code="unreadable") from None
    return f"{crc:08x}"


def _choose_type(nonzeros: np.ndarray) -> np.dtype:
    if nonzeros.dtype == FRACTIONS:
        return FRACTIONS
    if find_integer_type(nonzeros.max(initial=0)) == WHOLE[0]:
        return WHOLE[0]
    rare = nonzeros.size // RARE
    return next(dtype for dtype in WHOLE if np.count_nonzero(nonzeros > LARGEST[dtype]) <= rare)


def _split_large(flat: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if flat.dtype == dtype:
        return flat, np.empty(0, "<u4"), np.empty(0, "<i4")
    large_at, small = np.flatnonzero(flat > LARGEST[dtype]), flat.astype(dtype)
    small[large_at] = 0
    return small, large_at.astype("<u4"), flat[large_at].astype("<i4")


def _restore_large_counts(data: np.ndarray, large_at: np.ndarray, large: np.ndarray, first: int) -> np.ndarray:
    """Put the counts that are stored apart back into `data`, which starts at entry `first`, in a type wide enough."""
    begin, end = np.searchsorted(large_at, [first, first + len(data)])
    if begin == end:
        return data
    wide = find_integer_type(large[begin:end].max())
    data = data.astype(wide or WHOLE[-1])
    data[large_at[begin:end].astype(np.int64) - first] = large[begin:end]
    return data


def _to_segments(values: Csr, segments: int, index_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    index = values.indices.astype("<u2" if index_bytes == 2 else "<i4", copy=False)  # of 32 bits the low 16
    if segments == 1:
        return values.indptr.astype("<u4"), index
    row = np.repeat(np.arange(values.rows, dtype=np.int64) * segments, np.diff(values.indptr))
    lengths = np.bincount(row + (values.indices >> 16), minlength=values.rows * segments)
    starts = np.zeros(len(lengths) + 1, "<u4")
    np.cumsum(lengths, out=starts[1:], dtype="<u4")
    return starts, index


def _from_segments(starts: np.ndarray, index: np.ndarray, data: np.ndarray, segments: int) -> Csr:
    indptr = starts[::segments].astype(np.int64)
    indptr -= indptr[0]
    indices = index.astype(np.int32, copy=False)
    if segments > 1:
        first_term = np.arange(segments, dtype=np.int32) << 16
        indices += np.repeat(np.tile(first_term, len(indptr) - 1), np.diff(starts))
    return Csr(indptr, indices, data)


def _write_array(file: BinaryIO, array: np.ndarray, crc: int) -> int:
    if not array.size:
        return crc
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    content = memoryview(plain.data).cast("B")
    file.write(content)
    return zlib.crc32(content, crc)
