"""Of several failed ranks, the one to show.

When a rank dies, its peers fail a moment later with a broken connection. Those are echoes: true, and of no use to the
person who reads them. The cause is the earliest failure that is not an echo.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.errors import InternalError, OutOfMemory, PacelineError, RankUnresponsive, RunFailed, UserError

SECONDARY_ERROR_TYPES = {"DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
SECONDARY_ERROR_PATTERN = re.compile(
    r"closed by peer|reset by peer|connection (was )?(closed|refused|reset|aborted)|broken pipe|socket closed"
    r"|read error|pair closure|failed to (recv|send)|timed out (waiting|after)|remote process"
    r"|ncclRemoteError|ncclSystemError|monitoredBarrier|communicator was aborted",
    re.IGNORECASE,
)
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory?",
    signal.SIGBUS: "is /dev/shm full?",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "a crash in compiled code",
}
SIGNAL_OUTPUT: dict[int, str] = {signal.SIGSEGV: "; its stack is above", signal.SIGABRT: "; its message is above"}
KILL_NOTICE_S = 0.5  # a rank that is killed from outside came first, even if a peer's complaint reached us before


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed. It is made in that rank, or by the launcher for a rank that could not speak any more."""

    rank: int
    kind: Literal["user", "memory", "run", "bug", "died"]
    message: str
    traceback: str
    time_s: float  # since the epoch
    echo: bool
    signal: int = 0  # that killed it


def describe_exception(rank: int, error: BaseException) -> RankFailure:
    if isinstance(error, RankUnresponsive):
        return RankFailure(error.rank, "died", str(error), "", time.time(), echo=False)
    kind: Literal["user", "memory", "run", "bug"] = "bug"
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, PacelineError):
        kind = "user" if isinstance(error, UserError) else "memory" if isinstance(error, OutOfMemory) else "run"
        message = str(error)
    trace = "".join(traceback.format_exception(error))
    return RankFailure(rank, kind, message, trace, time.time(), is_secondary(error))


def describe_exit(rank: int | str, code: int, time_s: float, echo: bool, ours: bool = True) -> RankFailure:
    """For a process that ended without a word to us: a rank, or one described in words. What runs in it is our own
    code, which would have left a message, or `ours` is False."""
    number, who = (rank, f"rank {rank}") if isinstance(rank, int) else (0, rank)
    if code >= 0:
        silent = " and left no message" if ours else ""
        return RankFailure(number, "died", f"{who} ended with exit code {code}{silent}", "", time_s, echo)
    if code == -signal.SIGKILL:
        time_s -= KILL_NOTICE_S
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = f" ({SIGNAL_HINTS[-code]}{SIGNAL_OUTPUT.get(-code, '') if ours else ''})" if -code in SIGNAL_HINTS else ""
    return RankFailure(number, "died", f"{who} was killed by {name}{hint}", "", time_s, echo, -code)


def is_secondary(error: BaseException) -> bool:
    """Did this begin with a connection that broke or a peer that did not come?"""
    origin = [*iter_causes(error)][-1]
    names = {kind.__name__ for kind in type(origin).__mro__}
    return bool(names & SECONDARY_ERROR_TYPES) or (
        isinstance(origin, RuntimeError) and bool(SECONDARY_ERROR_PATTERN.search(str(origin)))
    )


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from; not those that it was raised in place of (`from None`)."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def find_root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    return min(failures, key=lambda failure: (failure.echo, failure.time_s))


def to_error(failure: RankFailure) -> PacelineError:
    """The failure as the error that the launcher raises: a traceback only where the fault is ours."""
    match failure.kind:
        case "user":
            return UserError(failure.message)
        case "memory":
            return OutOfMemory(f"rank {failure.rank}: {failure.message}")
        case "run":
            return RunFailed(f"rank {failure.rank}: {failure.message}")
        case "died":
            if failure.signal != signal.SIGKILL:
                return RunFailed(failure.message)
            killed = OutOfMemory(failure.message)
            killed.certain = False
            return killed
        case "bug":
            return InternalError(f"rank {failure.rank} failed with {failure.message}", failure.traceback)
