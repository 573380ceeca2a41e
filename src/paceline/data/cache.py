"""The folder of prepared data: an entry appears whole or not at all, and one process builds it while others wait."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from paceline.errors import RunFailed, UserError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
RETRIES, RETRY_S = 20, 0.1

Say = Callable[[str], None]


class Damaged(Exception):
    """A cache entry that is not whole: it is built again."""


class Summarised(Protocol):
    def summary(self) -> str:
        """What is in the entry, for the user."""
        ...


T = TypeVar("T", bound=Summarised)


@dataclass(frozen=True)
class CacheEntry(Generic[T]):
    """A folder that is named by its content, and how to read and to build it."""

    folder: Path
    read: Callable[[Path], T]
    """Raises `Damaged` where the folder is not whole."""
    build: Callable[[Path, Say], None]
    """Writes the files into the (temporary) folder that it is given."""

    def find(self, say: Say = lambda line: None) -> T | None:
        """What is in the cache; None where there is nothing, or nothing whole."""
        if not self.folder.exists():
            return None
        try:
            found = self.read(self.folder)
        except Damaged as damage:
            say(f"corpus: the cached {self.folder} is damaged ({damage}); building it again")
            return None
        say(f"corpus: {found.summary()}, from {self.folder}")
        return found

    def prepare(self, say: Say) -> T:
        """What is in the cache, or is built now."""
        if (found := self.find(say)) is not None:
            return found
        with exclusive(self.folder, say):
            if (found := self.find()) is not None:  # whoever held the lock before may have built it
                return found
            with new_entry(self.folder) as temporary:
                self.build(temporary, say)
            return self._read_built()

    def _read_built(self) -> T:
        """Where there are no locks another process may put its equal in this place just now: look again."""
        for _ in range(RETRIES):
            with suppress(Damaged):
                return self.read(self.folder)
            time.sleep(RETRY_S)
        return self.read(self.folder)


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
    with _disk_errors(entry.parent):
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.part-", dir=entry.parent))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())  # mkdtemp makes it private; a cache may be shared
            _rename_into_place(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _rename_into_place(temporary: Path, entry: Path) -> None:
    """What is in the way is damaged, or was built meanwhile and is equal."""
    while True:
        try:
            os.rename(temporary, entry)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        old = tempfile.mkdtemp(prefix=f"{entry.name}.part-", dir=entry.parent)
        with suppress(FileNotFoundError):
            os.rename(entry, Path(old, "old"))
        shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(entry: Path) -> None:
    """Under the lock nobody else builds this entry, so a temporary folder of it belongs to a process that died."""
    for leftover in entry.parent.glob(f"{entry.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


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
