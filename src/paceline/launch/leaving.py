"""The end of a rank whose work is done."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from paceline.launch.signals import STOP_SIGNALS


def leave(code: int) -> NoReturn:
    """End this process once its threads and exit functions are through, without the interpreter's farewell.

    Threads of gloo may still hold tensors of the last collective. One that lets go of them while the interpreter is
    taken down asks for a lock that is gone, and the process aborts after all is saved ("terminate called without an
    active exception").
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the work is done: a late one must not take its outcome away
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """The interpreter's farewell takes a tenth of a second, and after a failure it would wait for collectives that the
    peers never join."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
