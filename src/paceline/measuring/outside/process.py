"""Running the measured command: its output into a file, and no process of it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.launch.signals import StopRequest
from paceline.measuring.outside.request import Request

POLL_S = 0.05
GRACE_S = 10.0
"""For a command that was asked to stop."""


def run_noted(words: Sequence[str], request: Request, output: Path) -> int:
    """Run a command whose processes note their steps; its exit code, negative where a signal ended it."""
    with open(output, "wb") as file, StopRequest() as stop:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=request.environ(os.environ),
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stop.requested:
                time.sleep(POLL_S)
        finally:
            _end(process)
    if stop.requested:
        raise KeyboardInterrupt
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """A launcher ends its ranks when it is asked to; what is left of them after a while is killed."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
