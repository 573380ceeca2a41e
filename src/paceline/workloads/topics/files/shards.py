"""Counts as a folder of compact shards: counts.json, the shards, and the names of terms and documents.

The folder is written atomically. A shard's checksum is verified when its rows are first read. It holds some documents
as one binary file, little-endian, without padding:

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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import pydantic.dataclasses
from pydantic import Field

from paceline.data.cache import create_entry
from paceline.data.files import invalid_format, open_text, unreadable_error
from paceline.errors import InvalidData, UserError
from paceline.io.files import read_json, write_json
from paceline.io.format import size as format_size
from paceline.workload import LogFn
from paceline.workloads.topics.counts.matrices import (
    FRACTIONS,
    LARGEST,
    WHOLE,
    Counts,
    Csr,
    DocumentBlock,
    find_integer_type,
    iterate_overlaps,
    join_rows,
    join_values,
    stack_arrays,
    to_dense,
    to_sparse,
)
from paceline.workloads.topics.files.disk_counts import open_sequential, read_array_into

MANIFEST, NAMES = "counts.json", ("terms.txt", "docs.txt")
FORMAT = 1
SHARD_BYTES = 64 << 20
MAX_SHARD_BYTES = 1 << 30  # positions in a shard are uint32
SPARSE_BYTES = 5  # of a nonzero in a block; dense rows are handed out where they take less
SEGMENT_TERMS = 1 << 16
RARE = 16  # a wider type is taken when more than one count in so many needs it
AGAIN = "convert the source again or copy the folder again"
Size = Annotated[int, Field(ge=0, lt=2**40)]


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(strict=True))
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
    rows, counts = len(values), values.data if isinstance(values, Csr) else values[values != 0]
    nonzeros, data = len(counts), _choose_type(counts)
    segments = -(-terms // SEGMENT_TERMS)
    index_type: np.dtype = np.dtype("<u2")
    if 4 * rows * segments + 2 * nonzeros > 4 * rows + 4 * nonzeros:
        segments, index_type = 1, np.dtype("<i4")
    csr_bytes = 4 * (rows * segments + 1) + nonzeros * (index_type.itemsize + data.itemsize)
    layout = "csr" if csr_bytes < rows * terms * data.itemsize else "dense"
    values = to_sparse(values) if layout == "csr" else to_dense(values, terms)
    flat = values.data if isinstance(values, Csr) else values.ravel()
    assert flat.size < 2**32, "positions in a shard are uint32"
    large_at = np.flatnonzero(flat > LARGEST.get(data, np.inf))
    large, small = flat[large_at].astype("<i4"), flat.astype(data)
    small[large_at] = 0
    arrays = [large_at.astype("<u4"), large, small]
    if isinstance(values, Csr):
        index = values.indices.astype(index_type)  # of 32 bits the low 16
        arrays = [_find_segment_starts(values, segments), *arrays[:2], index, small]
    crc = 0
    with path.open("xb") as file:
        for array in arrays:
            crc = _write_array(file, array, crc)
        file.flush()
        os.fsync(file.fileno())
    largest, total = float(flat.max(initial=0)), sum(array.nbytes for array in arrays)
    facts: Any = (layout, index_type.name, segments, data.name, len(large), largest, total, f"{crc:08x}")
    return Shard(path.name, rows, nonzeros, *facts)


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
        indices = index.astype(np.int32)
        if shard.segments > 1:
            first_terms = np.arange(shard.segments, dtype=np.int32) << 16
            indices += np.repeat(np.tile(first_terms, stop - start), np.diff(starts))
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < terms:
            raise _damaged_shard_error(path, f"it has a term beyond its {terms:,} terms")
        return Csr(starts[:: shard.segments].astype(np.int64) - first, indices, data)


def _damaged_shard_error(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: the file is damaged: {reason}; {AGAIN}", code="damaged", key=path.name)


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
        raise unreadable_error(path, error) from None
    return f"{crc:08x}"


def _choose_type(nonzeros: np.ndarray) -> np.dtype:
    if nonzeros.dtype == FRACTIONS:
        return FRACTIONS
    rare = nonzeros.size // RARE
    return next(dtype for dtype in WHOLE if np.count_nonzero(nonzeros > LARGEST[dtype]) <= rare)


def _restore_large_counts(data: np.ndarray, large_at: np.ndarray, large: np.ndarray, first: int) -> np.ndarray:
    """Return `data`, which starts at entry `first`, with its large counts, in a type wide enough."""
    begin, end = np.searchsorted(large_at, [first, first + len(data)])
    if begin == end:
        return data
    wide = find_integer_type(large[begin:end].max())
    data = data.astype(wide or WHOLE[-1])
    data[large_at[begin:end].astype(np.int64) - first] = large[begin:end]
    return data


def _find_segment_starts(values: Csr, segments: int) -> np.ndarray:
    places = values.row_numbers * segments + (values.indices >> 16 if segments > 1 else 0)
    lengths = np.bincount(places, minlength=len(values) * segments)
    return np.concatenate(([0], np.cumsum(lengths))).astype("<u4")


def _write_array(file: BinaryIO, array: np.ndarray, crc: int) -> int:
    if not array.size:
        return crc
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    content = memoryview(plain.data).cast("B")
    file.write(content)
    return zlib.crc32(content, crc)


@dataclass(frozen=True, eq=False)
class ShardCounts(Counts):
    """Counts in a folder of shards. Blocks may cross from one shard to the next."""

    folder: Path
    documents: int
    terms: int
    sparse: bool
    shards: tuple[Shard, ...]
    verified: set[str] = field(default_factory=set)  # files of shards

    resident = False

    @property
    def stored_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        kind = None if self.fractional else find_integer_type(max(shard.largest for shard in self.shards))
        return self.terms * (kind.itemsize if kind else 4)

    def block(self, start: int, stop: int) -> DocumentBlock:
        parts = []
        for number, *rows in iterate_overlaps(self._first_rows, start, stop):
            shard = self.shards[number]
            self._verify_once(shard)
            parts.append(read_shard_rows(self.folder / shard.file, shard, self.terms, *rows))
        if self.sparse:
            return DocumentBlock(start, join_rows([to_sparse(part) for part in parts]))
        return DocumentBlock(start, stack_arrays([to_dense(part, self.terms) for part in parts]))

    def verify(self) -> None:
        """Verify all checksums now, also those of the names, which users may edit in their own folders."""
        for shard in self.shards:
            self._verify_once(shard)
        sums = read_json(self.folder / MANIFEST).get("names")
        for file in NAMES:
            if isinstance(sums, dict) and file in sums:
                verify_crc32(self.folder / file, sums[file])

    def weights(self) -> np.ndarray:
        return self._nonzeros_per_row if self.sparse else super().weights()

    def _verify_once(self, shard: Shard) -> None:
        if shard.file not in self.verified:
            verify_crc32(self.folder / shard.file, shard.crc32)
            self.verified.add(shard.file)

    @cached_property
    def _first_rows(self) -> np.ndarray:
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    @cached_property
    def _nonzeros_per_row(self) -> np.ndarray:
        return np.concatenate([self._row_lengths(shard) for shard in self.shards])

    def _row_lengths(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.file
        if shard.layout == "csr":
            offset, dtype, many = shard.section(self.terms)["starts"]
            starts = np.empty(many, dtype)
            with open_sequential(path) as handle:
                read_array_into(handle, starts, offset, path)
            return np.diff(starts[:: shard.segments].astype(np.int64))
        rows = max(1, SHARD_BYTES // self.terms)
        ranges = [(at, min(shard.rows, at + rows)) for at in range(0, shard.rows, rows)]
        dense = (read_shard_rows(path, shard, self.terms, *some) for some in ranges)
        return np.concatenate([np.count_nonzero(part, axis=1) for part in dense]).astype(np.int64)  # type: ignore[arg-type]


def read_shards(folder: Path, named: bool = True) -> ShardCounts:
    """Open a folder of shards and check that its files have the right length. `named` reads the names as well."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        found = f"its format is {manifest.get('format')}, this version reads {FORMAT}"
        raise invalid_format(f"{path}: {found}; {AGAIN}", MANIFEST)
    try:
        shards = tuple(Shard(**facts) for facts in manifest["shards"])
        documents, terms = int(manifest["documents"]), int(manifest["terms"])
        sparse, fractional = bool(manifest["sparse"]), bool(manifest["fractional"])
        if sum(shard.rows for shard in shards) != documents or terms <= 0 or not shards:
            raise ValueError(f"its shards do not add up to {documents:,} documents")
        sizes = [shard.expected_bytes(terms) for shard in shards]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        message = f"{path}: is damaged ({' '.join(str(error).split()):.200}); {AGAIN}"
        raise UserError(message, code="damaged", key=MANIFEST) from None
    for shard, needed in zip(shards, sizes, strict=True):
        file = folder / shard.file
        try:
            size = file.stat().st_size
        except OSError as error:
            raise unreadable_error(file, error) from None
        if size != needed:
            raise _damaged_shard_error(file, f"{size:,} of {needed:,} bytes")
    vocabulary, names = (
        None if not named else read_names(folder / file, expected, f"{MANIFEST} has {expected:,}; {AGAIN}")
        for file, expected in zip(NAMES, (terms, documents), strict=True)
    )
    labels: dict[str, Any] = {"vocabulary": vocabulary, "names": names, "fractional": fractional}
    return ShardCounts(folder, documents, terms, sparse, shards, **labels)


def write_shards(
    folder: Path,
    stream: Iterable[np.ndarray | Csr],
    terms: int,
    labels: Counts,
    *,
    shard_bytes: int = SHARD_BYTES,
    log: LogFn | None = None,
) -> ShardCounts:
    """Write rows, given in order as dense arrays or nonzeros, to a new folder of shards."""
    with create_entry(folder, "out") as temporary:
        shards: list[Shard] = []
        for values in _group_blocks(stream, shard_bytes):
            shards.append(write_shard(temporary / f"{len(shards):05d}.bin", values, terms))
            if log:
                log(f"shards: {sum(s.rows for s in shards):,} documents, {format_size(sum(s.bytes for s in shards))}")
        nonzeros, documents = sum(shard.nonzeros for shard in shards), sum(shard.rows for shard in shards)
        if not nonzeros:
            raise InvalidData(f"all {documents:,} x {terms:,} counts are zero")
        names = zip(NAMES, (labels.vocabulary, labels.names), strict=True)
        sums = {file: _write_names(temporary / file, lines) for file, lines in names if lines is not None}
        manifest = {
            "format": FORMAT,
            "documents": documents,
            "terms": terms,
            "nonzeros": nonzeros,
            "largest": max(shard.largest for shard in shards),
            "sparse": nonzeros * SPARSE_BYTES < documents * terms,
            "fractional": labels.fractional,
            "shards": [asdict(shard) for shard in shards],
            "names": sums,
        }
        write_json(temporary / MANIFEST, manifest)
    return read_shards(folder)


def _group_blocks(stream: Iterable[np.ndarray | Csr], shard_bytes: int) -> Iterator[np.ndarray | Csr]:
    parts: list[np.ndarray | Csr] = []
    gathered_bytes = 0
    for values in stream:
        if isinstance(values, Csr) or 3 * int(np.count_nonzero(values)) < values.nbytes:  # the smaller form in a shard
            values = to_sparse(values)
        nbytes = 4 * len(values) + 3 * len(values.data) if isinstance(values, Csr) else values.nbytes
        if parts and gathered_bytes + nbytes > min(shard_bytes, MAX_SHARD_BYTES):
            yield join_values(parts)
            parts, gathered_bytes = [], 0
        parts.append(values)
        gathered_bytes += nbytes
    if parts:
        yield join_values(parts)


def _write_names(path: Path, names: Iterable[str]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(" ".join(name.splitlines()) + "\n" for name in names)
    return compute_crc32(path)


def read_names(file: Path, expected: int, mismatch: str) -> list[str] | None:
    """Read a name per line; None where there is no such file. `mismatch` ends the error of a wrong number."""
    if not file.is_file():
        return None
    with open_text(file) as text:
        lines = [line.rstrip("\r\n") for line in text]
    if len(lines) != expected:
        raise InvalidData(f"{file}: {len(lines):,} lines, but {mismatch}", key=file.name)
    return lines
