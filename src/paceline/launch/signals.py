"""Turn stop signals into a request that the training loop reads, and end a rank's process cleanly.

Slurm warns before it takes a node away (SIGUSR1, SIGTERM), people press Ctrl-C (SIGINT) or close a terminal (SIGHUP).
All of them mean the same: stop after saving. A signal that comes twice, or to the launcher and to the rank, is still
one request.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SECOND_INTERRUPT_S = 1.0
KEPT_IF_IGNORED = (
    signal.SIGINT,
    signal.SIGHUP,
)  # `nohup` and `command &` ask for this; an ignored SIGUSR1 is an accident


class StopRequest:
    """While entered, the stop signals only set `requested`. Enter it first and leave it last: a signal that comes
    before or after ends the process as usual. Outside the main thread Python allows no handlers: the flag stays False.
    """

    def __init__(self, impatient: bool = False) -> None:
        """`impatient`: nobody else looks after this process, so a second Ctrl-C ends it at once."""
        self.impatient = impatient
        self.received: list[signal.Signals] = []  # each kind once, in the order in which they came
        self.interrupted_at: list[float] = []  # of each Ctrl-C
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.received)

    @property
    def signal_name(self) -> str | None:
        """Of the one that came first."""
        return self.received[0].name if self.received else None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number in KEPT_IF_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self.received:
            self.received.append(signal.Signals(number))
        if number != signal.SIGINT:
            return
        self.interrupted_at.append(time.monotonic())
        if self.impatient and self.insisted:
            raise KeyboardInterrupt
        if self.impatient and len(self.interrupted_at) == 1:
            os.write(2, b"SIGINT: the run stops when it has saved (Ctrl-C again ends it at once)\n")

    @property
    def insisted(self) -> bool:
        """Ctrl-C came again, and not as an echo of the first: a wrapper may pass one on twice."""
        return bool(self.interrupted_at) and self.interrupted_at[-1] - self.interrupted_at[0] > SECOND_INTERRUPT_S


def exit_rank(code: int) -> NoReturn:
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
    exit_immediately(code)


def exit_immediately(code: int) -> NoReturn:
    """The interpreter's farewell takes a tenth of a second, and after a failure it would wait for collectives that the
    peers never join."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
