"""Files that somebody named, for reading: plain ones alone, and no more of them than was asked for.

A pipe would be waited for without end, and a device may go on for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 1 << 28
"""Of a file that is read as a whole."""


def open_regular(path: Path) -> BufferedReader:
    """A file for reading its bytes; OSError where it is a pipe, a socket or a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(handle).st_mode, path)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """The same for a file that a library opens by its name."""
    _check(path.stat().st_mode, path)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The whole of a file; OSError where it is longer."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)  # which takes as much memory, whatever is there
        if len(content) > size:  # it grew meanwhile, or its file system does not say
            content += file.read(max(0, most + 1 - len(content)))
        if max(size, len(content)) > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return content


def read_text(path: Path, most: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """The same as text; UnicodeDecodeError where it is none."""
    return read_bytes(path, most).decode(encoding)


def _check(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
