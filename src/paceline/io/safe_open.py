"""Open files that a user named: regular files only, up to a size. A pipe or a device could block forever."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_BYTES = 1 << 28


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading bytes; raise OSError if it is not a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(handle).st_mode, path)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """Raise OSError if a file that a library opens by name is not a regular file."""
    _check(path.stat().st_mode, path)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a whole file; raise OSError if it is longer than `most`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)  # allocates as much, whatever the file holds
        if len(content) > size:  # it grew, or its file system reports no size
            content += file.read(max(0, most + 1 - len(content)))
        if max(size, len(content)) > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return content


def read_text(path: Path, most: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Read a whole text file."""
    return read_bytes(path, most).decode(encoding)


def _check(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
