"""Importing what writes checkpoints before it is needed, in a thread: that takes seconds, and a run has better to do.

Two threads must not import parts of torch that import each other. So it is begun when all that a rank imports is there,
and over before the compiler is imported.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module

_threads: list[threading.Thread] = []


def begin() -> None:
    """Once in a process, and not beside the compiler."""
    if not _threads and "torch._dynamo" not in sys.modules:
        name = "paceline.training.checkpoints.storage"
        _threads.append(threading.Thread(target=import_module, args=(name,), name="paceline-import", daemon=True))
        _threads[0].start()


def finish() -> None:
    """Wait until it is over, if it was begun."""
    for thread in _threads:
        thread.join()
