"""Turn stop signals into a request that the training loop reads, and end a rank's process cleanly.

SIGTERM, SIGINT, SIGUSR1 (of Slurm) and SIGHUP mean: save, then stop. One that arrives twice is one request.
"""

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
KEPT_IF_IGNORED = (signal.SIGINT, signal.SIGHUP)  # `nohup` and `command &` ignore these on purpose
SECOND_INTERRUPT_S = 1.0


class StopRequest:
    """Context manager in which the stop signals only set `requested`; it stays False outside the main thread."""

    def __init__(self, unsupervised: bool = False) -> None:
        """`unsupervised`: no launcher watches this process, so a second Ctrl-C ends it at once."""
        self.unsupervised = unsupervised
        self.received: list[signal.Signals] = []  # each once, in order of arrival
        self._interrupts: list[float] = []
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.received)

    @property
    def signal_name(self) -> str | None:
        return self.received[0].name if self.received else None

    @property
    def interrupted_twice(self) -> bool:
        """Return whether Ctrl-C was pressed again, and not just forwarded twice by a wrapper."""
        return bool(self._interrupts) and self._interrupts[-1] - self._interrupts[0] > SECOND_INTERRUPT_S

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number in KEPT_IF_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number not in self.received:
            self.received.append(signal.Signals(number))
        if number != signal.SIGINT:
            return
        self._interrupts.append(time.monotonic())
        if self.unsupervised and self.interrupted_twice:
            raise KeyboardInterrupt
        if self.unsupervised and len(self._interrupts) == 1:
            os.write(2, b"SIGINT: the run stops when it has saved (Ctrl-C again ends it at once)\n")


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on: the work is done, and a late one must not take away its outcome."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_rank(code: int) -> NoReturn:
    """End this process after its threads and exit functions, but without finalising the interpreter.

    Threads of gloo may still hold tensors; releasing one while the interpreter is finalised aborts the process.
    """
    ignore_stop_signals()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    exit_immediately(code)


def exit_immediately(code: int) -> NoReturn:
    """End this process now: after a failure, finalising would wait for collectives that the peers never join."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
