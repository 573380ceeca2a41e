"""Counts as a folder of compact shards: counts.json, the shards, and the names of terms and documents.

The folder appears whole or not at all. A shard's checksum is compared when its rows are first read.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import RunFailed, UserError
from paceline.record.files import read_json, write_json
from paceline.record.units import size
from paceline.workloads.topics.beside import read_names
from paceline.workloads.topics.blocks import (
    Block,
    Counts,
    Csr,
    allows_fractions,
    dense_rows,
    joined,
    no_rows,
    sparse_rows,
    stacked,
)
from paceline.workloads.topics.counts import read_counts
from paceline.workloads.topics.memory import sampled
from paceline.workloads.topics.narrow import whole_type
from paceline.workloads.topics.shard_format import AGAIN, Shard, read_rows, row_starts, verify, write_shard
from paceline.workloads.topics.stream import blocks

if TYPE_CHECKING:
    from paceline.workloads.topics.text import TextOptions

MANIFEST = "counts.json"
FORMAT = 1
SHARD_BYTES = 64 << 20
MOST_SHARD_BYTES = 1 << 30  # positions in a shard are uint32
SPARSE_BYTES = 5  # of a nonzero in a block; dense rows are handed out where they take less
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class ShardCounts:
    """Counts in a folder of shards. Blocks may cross from one shard to the next."""

    folder: Path
    documents: int
    terms: int
    sparse: bool
    shards: tuple[Shard, ...]
    vocabulary: Sequence[str] | None = None
    names: Sequence[str] | None = None
    fractional: bool = False
    checked: set[str] = field(default_factory=set)  # shards whose checksum was compared

    resident = False

    @property
    def stored_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Of a dense row as it is handed out."""
        kind = None if self.fractional else whole_type(max(shard.largest for shard in self.shards))
        return self.terms * (kind.itemsize if kind else 4)

    def block(self, start: int, stop: int) -> Block:
        if start >= stop:
            return no_rows(start, self.terms, self.sparse)
        first = int(np.searchsorted(self._first_rows, start, "right")) - 1
        parts = []
        for number in range(first, len(self.shards)):
            begins = int(self._first_rows[number])
            if begins >= stop:
                break
            shard = self.shards[number]
            self._check(shard)
            rows = max(start - begins, 0), min(stop - begins, shard.rows)
            parts.append(read_rows(self.folder / shard.file, shard, self.terms, *rows))
        return Block(start, self._one_kind(parts))

    def weights(self) -> np.ndarray:
        return self._weights

    def verify(self) -> None:
        """Compare every checksum now."""
        for shard in self.shards:
            self._check(shard)

    def _check(self, shard: Shard) -> None:
        if shard.file not in self.checked:
            verify(self.folder / shard.file, shard)
            self.checked.add(shard.file)

    def _one_kind(self, parts: list[np.ndarray | Csr]) -> np.ndarray | Csr:
        if self.sparse:
            return joined([part if isinstance(part, Csr) else sparse_rows(part) for part in parts])
        rows = [dense_rows(part, self.terms) if isinstance(part, Csr) else part for part in parts]
        return stacked(rows)

    @cached_property
    def _first_rows(self) -> np.ndarray:
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    @cached_property
    def _weights(self) -> np.ndarray:
        if not self.sparse:
            return np.full(self.documents, self.terms, np.int64)
        return np.concatenate([self._lengths(shard) for shard in self.shards])

    def _lengths(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.file
        if shard.layout == "csr":
            return np.diff(row_starts(path, shard, self.terms))
        rows = max(1, SHARD_BYTES // self.terms)
        ranges = [(at, min(shard.rows, at + rows)) for at in range(0, shard.rows, rows)]
        dense = (read_rows(path, shard, self.terms, *some) for some in ranges)
        return np.concatenate([np.count_nonzero(part, axis=1) for part in dense]).astype(np.int64)  # type: ignore[arg-type]


def read_shards(folder: Path) -> ShardCounts:
    """Open a folder of shards: all files are there and as long as they should be."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: its format is {manifest.get('format')}, this version reads {FORMAT}; {AGAIN}")
    try:
        shards = tuple(Shard(**facts) for facts in manifest["shards"])
        documents, terms = int(manifest["documents"]), int(manifest["terms"])
        sparse, fractional = bool(manifest["sparse"]), bool(manifest["fractional"])
        agree = sum(shard.rows for shard in shards) == documents and terms > 0 and bool(shards)
        plain = all(Path(shard.file).name == shard.file for shard in shards)
        expected = [shard.expected_bytes(terms) for shard in shards]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is damaged ({type(error).__name__}: {error}); {AGAIN}") from None
    if not (agree and plain):
        raise UserError(f"{path}: is damaged: its shards do not add up to {documents:,} documents; {AGAIN}")
    for shard, needed in zip(shards, expected, strict=True):
        _check_size(folder / shard.file, needed)
    vocabulary, names = _names(folder, "terms.txt", terms), _names(folder, "docs.txt", documents)
    return ShardCounts(folder, documents, terms, sparse, shards, vocabulary, names, fractional)


def convert(
    source: Any,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    fractional: bool = False,
    text: TextOptions | None = None,
    say: Say | None = None,
) -> ShardCounts:
    """Write counts from anything that `read_counts` takes as a folder of shards. Memory stays at a few shards."""
    from paceline.workloads.topics.documents import is_text
    from paceline.workloads.topics.text import convert_text

    folder = Path(out).expanduser().absolute()
    _check_new(folder)
    if isinstance(source, str | Path) and is_text(Path(source).expanduser()):
        return convert_text(Path(source).expanduser(), folder, text, shard_bytes=shard_bytes, say=say)
    counts = read_counts(source, fractional=fractional)
    _check_space(folder, _estimated_bytes(counts))
    stream = (block.values for block in blocks(counts, block_bytes=min(shard_bytes, SHARD_BYTES)))
    return write_shards(
        folder,
        stream,
        counts.terms,
        vocabulary=counts.vocabulary,
        names=counts.names,
        fractional=allows_fractions(counts),
        shard_bytes=shard_bytes,
        say=say,
    )


def write_shards(
    folder: Path,
    stream: Iterable[np.ndarray | Csr],
    terms: int,
    *,
    vocabulary: Sequence[str] | None = None,
    names: Iterable[str] | None = None,
    fractional: bool = False,
    shard_bytes: int = SHARD_BYTES,
    say: Say | None = None,
) -> ShardCounts:
    """Write rows, given in order as dense arrays or nonzeros, as a new folder of shards."""
    folder = Path(folder).expanduser().absolute()
    _check_new(folder)
    with _new_folder(folder) as temporary:
        shards: list[Shard] = []
        for values in _gathered(stream, terms, shard_bytes):
            shards.append(write_shard(temporary / f"{len(shards):05d}.bin", values, terms))
            if say:
                say(f"shards: {sum(s.rows for s in shards):,} documents, {size(sum(s.bytes for s in shards))}")
        nonzeros, documents = sum(shard.nonzeros for shard in shards), sum(shard.rows for shard in shards)
        if not nonzeros:
            raise UserError(f"all {documents:,} x {terms:,} counts are zero: there is nothing to write")
        _write_names(temporary / "terms.txt", vocabulary)
        _write_names(temporary / "docs.txt", names)
        manifest = {
            "format": FORMAT,
            "documents": documents,
            "terms": terms,
            "nonzeros": nonzeros,
            "largest": max(shard.largest for shard in shards),
            "sparse": nonzeros * SPARSE_BYTES < documents * terms,
            "fractional": fractional,
            "shards": [asdict(shard) for shard in shards],
        }
        write_json(temporary / MANIFEST, manifest)
    return read_shards(folder)


def _gathered(stream: Iterable[np.ndarray | Csr], terms: int, shard_bytes: int) -> Iterator[np.ndarray | Csr]:
    """Blocks put together until they fill a shard."""
    parts: list[np.ndarray | Csr] = []
    gathered_bytes = 0
    for values in stream:
        compact, nbytes = _compact(values)
        if parts and gathered_bytes + nbytes > min(shard_bytes, MOST_SHARD_BYTES):
            yield _together(parts, terms)
            parts, gathered_bytes = [], 0
        parts.append(compact)
        gathered_bytes += nbytes
    if parts:
        yield _together(parts, terms)


def _compact(values: np.ndarray | Csr) -> tuple[np.ndarray | Csr, int]:
    """The values as they take less room, and about how much that is in a shard."""
    if not isinstance(values, Csr):
        nonzeros_bytes = 3 * int(np.count_nonzero(values))
        if nonzeros_bytes >= values.nbytes:
            return values, values.nbytes
        values = sparse_rows(values)
    return values, 4 * values.rows + 3 * len(values.data)


def _together(parts: list[np.ndarray | Csr], terms: int) -> np.ndarray | Csr:
    if len(parts) == 1:
        return parts[0]
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    if len(dense) == len(parts):
        return stacked(dense)
    return joined([part if isinstance(part, Csr) else sparse_rows(part) for part in parts])


def _estimated_bytes(counts: Counts) -> int:
    """About what the shards will take, from a sample where the counts are dense."""
    if counts.sparse:
        return int(4 * counts.documents + 4 * counts.weights().sum())
    dense = [np.asarray(values) for values in sampled(counts)]
    per_row = sum(_compact(rows)[1] for rows in dense) / sum(len(rows) for rows in dense)
    return int(1.1 * per_row * counts.documents)


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give a new folder, or remove this one first")


def _check_space(folder: Path, needed_bytes: int) -> None:
    there = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise UserError(
            f"{folder}: about {size(needed_bytes)} are needed, {size(free)} are free; free some space, or give a "
            "folder on a larger disk"
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside, which takes its name when it is complete, and is removed after an error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
        try:
            yield temporary
            mask = os.umask(0o022)
            os.umask(mask)
            temporary.chmod(0o777 & ~mask)  # mkdtemp makes it private
            if folder.is_dir():
                folder.rmdir()  # it was empty
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(f"{folder}: the disk is full; free some space, or give a folder on a larger disk") from None
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}; give a folder of yours") from None


def _write_names(path: Path, names: Iterable[str] | None) -> None:
    if names is not None:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(" ".join(name.splitlines()) + "\n" for name in names)


def _names(folder: Path, name: str, expected: int) -> Sequence[str] | None:
    path = folder / name
    if not path.is_file():
        return None
    lines = read_names(path)
    if len(lines) != expected:
        raise UserError(f"{path}: {len(lines):,} lines, but {MANIFEST} says {expected:,}; {AGAIN}")
    return lines


def _check_size(path: Path, needed: int) -> None:
    try:
        there = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: this shard is missing; {AGAIN}") from None
    except OSError as error:
        raise UserError(f"{path}: the shard cannot be read: {error.strerror}; {AGAIN}") from None
    if there != needed:
        raise UserError(f"{path}: the shard is damaged: {there:,} bytes instead of {needed:,}; {AGAIN}")
