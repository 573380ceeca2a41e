"""Signals as a polite request: a flag that the training loop reads between two steps.

Slurm warns before it takes a node away (SIGUSR1, SIGTERM), people press Ctrl-C (SIGINT) or close a terminal (SIGHUP).
All of them mean the same: stop after saving. A signal that comes twice, or to the launcher and to the rank, is still
one request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
AGAIN_S = 1.0
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)  # `nohup` and `command &` ask for this; an ignored SIGUSR1 is an accident


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
                if number in LEFT_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
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
        return bool(self.interrupted_at) and self.interrupted_at[-1] - self.interrupted_at[0] > AGAIN_S
