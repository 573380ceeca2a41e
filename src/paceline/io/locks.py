"""Lock files that the kernel releases when their holder dies."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def hold_lock(file: Path, on_wait: Callable[[], None], timeout_s: float = -1) -> Iterator[bool]:
    """Hold an exclusive lock, and yield whether it is held: some network file systems have none.

    Calls `on_wait` once if another process holds it. Raises TimeoutError after `timeout_s` (never, if negative), and
    another OSError if the file cannot be opened.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire(timeout_s, poll_interval=1)
    except OSError as error:
        if error.errno not in LOCKS_UNSUPPORTED:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()
