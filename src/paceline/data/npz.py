"""Opening .npz files of the user's: packed arrays, which may unpack to more than there is memory for."""

from __future__ import annotations

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

from paceline.errors import UserError
from paceline.io.safe_open import check_regular

UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, NotImplementedError, MemoryError, OverflowError),
    *(SyntaxError, RecursionError, TokenError),  # numpy reads headers as Python literals
    EOFError,
)
"""What numpy and scipy raise for arrays that are none; one may claim to be larger than the memory."""
END_BYTES = (1 << 16) + 22
"""At the end of a zip file, with its comment: where the list of what it holds is described."""
MOST_LISTED_BYTES = 1 << 18
"""Of that list: that of a few thousand arrays."""


@dataclass(frozen=True)
class ArrayHead:
    """An array of a .npz file that is not read as a whole."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unpacked_bytes: int
    first: np.ndarray
    """Its first rows; empty where they do not lie together."""


def read_npz_heads(path: Path, most_bytes: int) -> dict[str, ArrayHead]:
    """What the arrays of a .npz file are, by their names, with so many bytes of the first rows of each."""
    with _translate_npz_errors(path):
        _check_directory(path)
        found = {}
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".npy"):
                    with archive.open(entry) as file:
                        found[entry.filename.removesuffix(".npy")] = _read_head(file, entry, most_bytes)
        return found


def _read_head(file: IO[bytes], entry: zipfile.ZipInfo, most_bytes: int) -> ArrayHead:
    shape, in_columns, dtype = _check_npy(file, entry)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows = 0 if in_columns or dtype.hasobject or not shape else min(shape[0], most_bytes // max(1, row_bytes))
    first = np.frombuffer(file.read(rows * row_bytes), dtype).reshape(rows, *shape[1:])
    return ArrayHead(shape, dtype, entry.file_size, first)


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """The arrays of a .npz file by their names, if each is as long as it says and all of them fit into memory."""
    import psutil

    with _translate_npz_errors(path):
        _check_directory(path)
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            for entry in archive.infolist():
                if entry.filename.endswith(".npy"):
                    with archive.open(entry) as file:
                        _check_npy(file, entry)
        free = psutil.virtual_memory().available
        if unpacked > free:
            raise UserError(
                f"{path}: holds {unpacked / 1e9:,.1f} GB once unpacked, and {free / 1e9:,.1f} GB of memory are free; "
                "write its arrays as .npy files, which are read piece by piece"
            )
        with np.load(path, allow_pickle=False) as archive:
            yield archive


@contextmanager
def _translate_npz_errors(path: Path) -> Iterator[None]:
    """What goes wrong inside is the user's file, and is said so."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "the zip archive is damaged or cut short"
        raise UserError(f"{path}: cannot be read: {reason}; write it again or copy it again") from None
    except UNREADABLE as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not arrays that can be read ({said}); write it again or copy it again") from None


def _check_directory(path: Path) -> None:
    """That there are not very many arrays: each takes time to look at, and a list of them takes memory."""
    check_regular(path)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - END_BYTES))
        end = file.read(END_BYTES)
    at = end.rfind(b"PK\x05\x06")
    if at >= 0 and int.from_bytes(end[at + 12 : at + 16], "little") > MOST_LISTED_BYTES:
        raise UserError(f"{path}: holds thousands of arrays; a file of a few is read")


def _check_npy(file: IO[bytes], entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of an array, whether it lies column by column, and its type.

    It must not be larger than what was packed: its memory is taken before its numbers are read.
    """
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, in_columns, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"{entry.filename} says that its shape is {list(shape)}, and has {entry.file_size:,} bytes")
    return shape, in_columns, dtype
