"""Open the user's .npz files: compressed arrays, which may be larger than memory once unpacked."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from paceline.data.files import invalid_format
from paceline.errors import UserError, get_first_line
from paceline.io.files import check_regular

UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, NotImplementedError, MemoryError, OverflowError),
    *(SyntaxError, RecursionError, TokenError),  # numpy parses headers as Python literals
    EOFError,
)
"""What numpy and scipy raise for invalid arrays; one may claim to be larger than memory."""


@dataclass(frozen=True)
class ArrayHead:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unpacked_bytes: int
    first: np.ndarray


def read_npz_heads(path: Path, most_bytes: int) -> dict[str, ArrayHead]:
    """Return shape, type, size and first rows of each array, by name."""
    heads = {}
    with _open_archive(path) as archive:
        for entry, file in _iter_arrays(archive):
            shape, by_columns, dtype = _read_header(file, entry)
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            skip = by_columns or dtype.hasobject or not shape
            rows = 0 if skip else min(shape[0], most_bytes // max(1, row_bytes))
            first = np.frombuffer(file.read(rows * row_bytes), dtype).reshape(rows, *shape[1:])
            heads[entry.filename.removesuffix(".npy")] = ArrayHead(shape, dtype, entry.file_size, first)
    return heads


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open the arrays of a .npz file by name, if each is as long as its header says and all of them fit into memory."""
    import psutil

    with _open_archive(path) as archive:
        for entry, file in _iter_arrays(archive):
            _read_header(file, entry)
        unpacked, free = sum(entry.file_size for entry in archive.infolist()), psutil.virtual_memory().available
        if unpacked > free:
            need = f"needs {unpacked / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free"
            raise UserError(f"{path}: {need}; write its arrays as .npy files, which are mapped", code="does-not-fit")
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            yield archive
    except UserError:
        raise
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "the zip archive is damaged or truncated"
        raise invalid_format(f"{path}: cannot be read: {reason}; copy it again") from None
    except UNREADABLE as error:
        raise invalid_format(f"{path}: has no readable arrays ({get_first_line(error)}); copy it again") from None


def _iter_arrays(archive: zipfile.ZipFile) -> Iterator[tuple[zipfile.ZipInfo, IO[bytes]]]:
    for entry in archive.infolist():
        if entry.filename.endswith(".npy"):
            with archive.open(entry) as file:
                yield entry, file


def _read_header(file: IO[bytes], entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return (shape, whether it is stored by columns, dtype); reject an array that claims to be larger than its file.

    numpy would allocate its memory before it reads the numbers.
    """
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"{entry.filename} says that its shape is {list(shape)}, and has {entry.file_size:,} bytes")
    return shape, by_columns, dtype
