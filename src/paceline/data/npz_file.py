"""Opening .npz files of the user's: packed arrays, which may unpack to more than there is memory for."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from paceline.errors import UserError
from paceline.plain_files import check_plain

UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, NotImplementedError, MemoryError, OverflowError),
    *(SyntaxError, RecursionError, TokenError),  # numpy reads headers as Python literals
    EOFError,
)
"""What numpy and scipy raise for arrays that are none; one may claim to be larger than the memory."""


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """The arrays of a .npz file by their names, if each is as long as it says and all of them fit into memory."""
    import psutil

    try:
        check_plain(path)
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            for entry in archive.infolist():
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
    except UserError:
        raise
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "the zip archive is damaged or cut short"
        raise UserError(f"{path}: cannot be read: {reason}; write it again or copy it again") from None
    except UNREADABLE as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not arrays that can be read ({said}); write it again or copy it again") from None


def _check_npy(file: IO[bytes], entry: zipfile.ZipInfo) -> None:
    """That an array is not larger than what was packed: its memory is taken before its numbers are read."""
    if not entry.filename.endswith(".npy"):
        return
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError(f"{entry.filename} says that its shape is {list(shape)}, and has {entry.file_size:,} bytes")
