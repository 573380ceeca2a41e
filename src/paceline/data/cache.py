"""The folder of prepared data: an entry appears whole or not at all, and one process builds it while others wait."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import RunFailed, UserError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}

Say = Callable[[str], None]


@contextmanager
def exclusive(entry: Path, say: Say) -> Iterator[None]:
    """Hold the lock of an entry. It is the kernel's, so it is let go when its holder dies.

    Some network file systems have no locks: there, two processes may build the same entry, and one replaces the
    other's by its equal.
    """
    with _disk_errors(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = open(f"{entry}.lock", "a")  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"corpus: another process is preparing {entry.name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise UserError(f"{file.name}: cannot be locked: {error.strerror}; type  data.cache=FOLDER") from None
        else:
            _remove_leftovers(entry)
        yield


@contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """A temporary folder beside the entry; it becomes the entry at the end, or is removed if there is an error."""
    with _disk_errors(entry.parent), _temporary_beside(entry) as outer:
        new = outer / "new"
        new.mkdir()  # the outer one is private, but a cache may be shared
        yield new
        _rename_into_place(new, entry)


def _rename_into_place(new: Path, entry: Path) -> None:
    """What is in the way is damaged, or was built meanwhile and is equal."""
    while True:
        try:
            os.rename(new, entry)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        with _temporary_beside(entry) as outer, suppress(FileNotFoundError):
            os.rename(entry, outer / "old")


@contextmanager
def _temporary_beside(entry: Path) -> Iterator[Path]:
    prefix = f"{entry.name}.part-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _remove_leftovers(entry: Path) -> None:
    """Under the lock nobody else builds this entry, so a temporary folder of it belongs to a process that died."""
    for leftover in entry.parent.glob(f"{entry.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunFailed(
                f"data.cache={folder}: the disk is full; free some space, or type  data.cache=FOLDER  with a folder "
                "on a larger disk"
            ) from None
        raise UserError(
            f"data.cache={folder}: cannot be written ({error.strerror or error}); type  data.cache=FOLDER  with a "
            "folder of yours"
        ) from None
