"""Counts as a folder of compact shards: counts.json, the shards, and the names of terms and documents.

The folder is written atomically. A shard's checksum is verified when its rows are first read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.cache import create_entry
from paceline.data.files import open_text
from paceline.errors import InvalidData, UserError
from paceline.io.files import read_json, write_json
from paceline.io.format import size as format_size
from paceline.workload import LogFn
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DocumentBlock,
    find_integer_type,
    iterate_overlaps,
    join_rows,
    stack_arrays,
    to_dense,
    to_sparse,
)
from paceline.workloads.topics.files.shard_format import (
    AGAIN,
    Shard,
    compute_crc32,
    read_row_starts,
    read_shard_rows,
    verify_crc32,
    write_shard,
)

MANIFEST, NAMES = "counts.json", ("terms.txt", "docs.txt")
FORMAT = 1
SHARD_BYTES = 64 << 20
MAX_SHARD_BYTES = 1 << 30  # positions in a shard are uint32
SPARSE_BYTES = 5  # of a nonzero in a block; dense rows are handed out where they take less


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
            return np.diff(read_row_starts(path, shard, self.terms))
        rows = max(1, SHARD_BYTES // self.terms)
        ranges = [(at, min(shard.rows, at + rows)) for at in range(0, shard.rows, rows)]
        dense = (read_shard_rows(path, shard, self.terms, *some) for some in ranges)
        return np.concatenate([np.count_nonzero(part, axis=1) for part in dense]).astype(np.int64)  # type: ignore[arg-type]


def read_shards(folder: Path, named: bool = True) -> ShardCounts:
    """Open a folder of shards and check that its files have the right length. `named` reads the names as well."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        message = f"{path}: its format is {manifest.get('format')}, this version reads {FORMAT}; {AGAIN}"
        raise UserError(message, code="invalid-format", key=MANIFEST)
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
            raise UserError(f"{file}: cannot be read: {error.strerror}; {AGAIN}", code="unreadable") from None
        if size != needed:
            raise UserError(f"{file}: the shard is damaged: {size:,} of {needed:,} bytes; {AGAIN}", code="damaged")
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
        nbytes = 4 * values.rows + 3 * len(values.data) if isinstance(values, Csr) else values.nbytes
        if parts and gathered_bytes + nbytes > min(shard_bytes, MAX_SHARD_BYTES):
            yield _concatenate_rows(parts)
            parts, gathered_bytes = [], 0
        parts.append(values)
        gathered_bytes += nbytes
    if parts:
        yield _concatenate_rows(parts)


def _concatenate_rows(parts: list[np.ndarray | Csr]) -> np.ndarray | Csr:
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    if len(dense) == len(parts):
        return stack_arrays(dense)
    return join_rows([to_sparse(part) for part in parts])


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
        raise UserError(f"{file}: {len(lines):,} lines, but {mismatch}", code="invalid-data", key=file.name)
    return lines
