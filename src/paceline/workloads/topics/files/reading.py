"""Read counts from arrays, tensors, sparse matrices, files and folders, and convert them to shards."""

import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import invalid_format, unreadable_error
from paceline.data.frames import is_frame, to_arrow
from paceline.data.npz import open_npz
from paceline.errors import InvalidData, UserError, get_first_line, join_names, suggest_path
from paceline.io.escape import to_one_line
from paceline.io.files import check_regular
from paceline.workload import LogFn
from paceline.workloads.topics.counts.arrays import KINDS, from_array, from_scipy, from_torch
from paceline.workloads.topics.counts.matrices import Counts, Csr, check_matrix
from paceline.workloads.topics.counts.stream import iterate_blocks
from paceline.workloads.topics.files import disk_counts, shards
from paceline.workloads.topics.files.disk_counts import AGAIN
from paceline.workloads.topics.files.shards import SHARD_BYTES, ShardCounts, write_shards
from paceline.workloads.topics.files.texts import TermCounter, TextOptions, is_text, iterate_documents, read_text


def read_counts(
    source: Any, *, fractional: bool = False, text: TextOptions | None = None, on_device: bool = False
) -> Counts:
    """Read counts from a path, an ndarray, a torch tensor, a scipy sparse matrix, a dataset on disk or a table.

    Of a table (pandas, polars, Arrow), columns of numbers are terms; a column of texts has a document in each row.

    What is in memory, .npz and .mtx are converted to their smallest exact type now; .npy, shards and Parquet files of
    counts stay on disk. `on_device`: a dense or sparse CSR tensor of a device stays there instead of being copied.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source).expanduser(), fractional, text)
    if is_frame(source):
        return _read_frame(source, fractional, text)
    if callable(getattr(source, "as_counts", None)):  # the datasets of files/datasets.py
        return source.as_counts(fractional=fractional)
    if isinstance(source, Counts):
        return replace(source, fractional=True) if fractional else source
    if type(source).__module__.partition(".")[0] == "torch":
        return from_torch(source, fractional=fractional, on_device=on_device)
    if type(source).__module__.startswith("scipy.sparse"):
        return from_scipy(source, fractional=fractional)
    if isinstance(source, np.memmap):
        return _from_memmap(source, fractional)
    return from_array(source, fractional=fractional)


def _read_frame(frame: Any, fractional: bool, options: TextOptions | None) -> Counts:
    table = to_arrow(frame)
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    texts = [name for name, kind in kinds.items() if "string" in kind]
    if len(texts) > 1 and "text" in texts:
        texts = ["text"]
    if len(texts) > 1:
        message = f"the table has several columns of texts ({join_names(texts)}); give one, as  table[[{texts[0]!r}]]"
        raise InvalidData(message, key="X")
    if texts:
        return read_text([value or "" for value in table[texts[0]].to_pylist()], options)
    columns = [table[name].to_numpy() for name in table.column_names]
    counts: Any = from_array(np.stack(columns, axis=1) if columns else np.empty((0, 0)), fractional=fractional)
    return replace(counts, vocabulary=table.column_names)


def _from_memmap(array: np.memmap, fractional: bool) -> Counts:
    """Read a whole file that numpy has mapped as a file; a part of one through the mapping."""
    source = str(array.filename or "the mapped matrix")
    check_matrix(array.shape, source, array.dtype)
    if isinstance(array.base, mmap.mmap) and array.filename and array.flags.c_contiguous and array.mode != "c":
        path = Path(array.filename)
        return disk_counts.NpyCounts(path, *array.shape, array.dtype, array.offset, fractional=fractional)
    return disk_counts.MappedCounts(array, source, fractional=fractional)


def _read_path(path: Path, fractional: bool, options: TextOptions | None) -> Counts:
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder{suggest_path(path)}", code="not-found", key=str(path))
        if is_text(path):
            return read_text(path, options)
        if (path / shards.MANIFEST).exists():
            return shards.read_shards(path)
        if path.is_dir():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise invalid_format(f"{path}: a folder without {shards.MANIFEST} and without .txt files (found: {found})")
        check_regular(path)
    except OSError as error:
        raise unreadable_error(path, error) from None
    name = path.name.lower().removesuffix(".gz")
    read = next((read for suffix, read in READERS.items() if name.endswith(suffix)), None)
    if read is None:
        raise invalid_format(f"{path}: unknown format; give {KINDS}")
    counts: Any = read(path, fractional)
    vocabulary = _read_names_beside(path, "terms", counts.terms)
    return replace(counts, vocabulary=vocabulary, names=_read_names_beside(path, "docs", counts.documents))


def _read_names_beside(path: Path, what: str, expected: int) -> list[str] | None:
    """Read NAME.terms.txt or terms.txt beside the matrix, a name per line, and likewise docs.txt."""
    stem, side = path.name.removesuffix(".gz").rpartition(".")[0], "columns" if what == "terms" else "rows"
    own = path.with_name(f"{stem}.{what}.txt")
    file = own if own.is_file() else path.with_name(f"{what}.txt")
    mismatch = f"{path.name} has {expected:,} {side}; give one line for each, or move {file.name} away"
    return shards.read_names(file, expected, mismatch)


def read_npz_counts(path: Path, fractional: bool = False) -> Counts:
    import scipy.sparse

    with open_npz(path) as archive:
        names, matrix = archive.files, None
        if "format" in names:
            matrix = scipy.sparse.load_npz(path)
            if hasattr(matrix, "check_format"):
                matrix.check_format(full_check=True)
        elif len(names) == 1:
            matrix = archive[names[0]]
    if matrix is None:
        found = to_one_line(", ".join(names)) or "nothing"
        raise InvalidData(f"{path}: neither a matrix of scipy.sparse.save_npz nor a single array (found: {found})")
    return _from_matrix(matrix, path, fractional)


def read_mtx(path: Path, fractional: bool = False) -> Counts:
    from scipy.io import mmread

    try:
        matrix = mmread(path, spmatrix=False)
    except (OSError, EOFError, zlib.error, ValueError, OverflowError, TypeError) as error:
        message = f"{path}: cannot be read as a Matrix Market file ({get_first_line(error)}); {AGAIN}"
        raise invalid_format(message) from None
    return _from_matrix(matrix, path, fractional)


def _from_matrix(matrix: Any, path: Path, fractional: bool) -> Counts:
    read: Any = from_array if isinstance(matrix, np.ndarray) else from_scipy
    return read(matrix, fractional=fractional, source=str(path))


READERS: dict[str, Callable[[Path, bool], Counts]] = {
    ".npy": disk_counts.read_npy,
    ".npz": read_npz_counts,
    ".mtx": read_mtx,
    ".parquet": disk_counts.read_parquet_counts,
}


def convert(
    source: Any,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    fractional: bool = False,
    text: TextOptions | None = None,
    log: LogFn | None = None,
) -> ShardCounts:
    """Write counts from anything that `read_counts` takes to a folder of shards, with a few shards in memory."""
    folder = Path(out).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists; give a new folder, or remove this one first", code="conflict")
    if isinstance(source, str | Path) and is_text(Path(source).expanduser()):
        words, labels = _count_texts(Path(source).expanduser(), text or TextOptions())
        return write_shards(folder, words, len(labels.vocabulary or ()), labels, shard_bytes=shard_bytes, log=log)
    counts = read_counts(source, fractional=fractional)
    stream = (block.values for block in iterate_blocks(counts, block_bytes=min(shard_bytes, SHARD_BYTES)))
    return write_shards(folder, stream, counts.terms, counts, shard_bytes=shard_bytes, log=log)


def _count_texts(source: Path, options: TextOptions) -> tuple[Iterator[Csr], Counts]:
    first = TermCounter(options)
    deque(first.count(iterate_documents(source, options.column, options.name_column)), 0)
    _, terms = first.vocabulary(source)
    second = TermCounter(options, terms).count(iterate_documents(source, options.column, options.name_column))
    return second, Counts(vocabulary=terms, names=first.names or None)
