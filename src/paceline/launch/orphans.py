"""End the ranks of a user's command whose launcher was killed.

The launcher writes the process id of each rank to our standard input. It kills this process when all have ended; if
it dies itself, the kernel closes the pipe. This file runs as a script, and uses the standard library alone.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 30.0
POLL_EVERY_S = 0.1


def kill_orphans(lines: Iterable[str]) -> None:
    """Read process ids until the pipe closes, then end these process groups."""
    ranks = [int(line) for line in lines]
    alive = _signal_groups(ranks, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while alive and time.monotonic() < deadline_s:
        time.sleep(POLL_EVERY_S)
        alive = _signal_groups(alive, 0)
    _signal_groups(alive, signal.SIGKILL)


def _signal_groups(groups: list[int], number: int) -> list[int]:
    reached = []
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            reached.append(group)
    return reached


if __name__ == "__main__":
    kill_orphans(sys.stdin)
