"""Find the rank whose failure caused the others.

When a rank dies, its peers fail a moment later with a broken connection: the root cause is the earliest failure that is
not such a secondary one.
"""

import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
KILL_NOTICE_S = 0.5  # a killed rank failed first, even if a peer's error arrived so much earlier


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed: reported by the rank, or by the launcher for a rank that could not report."""

    rank: int
    error: PacelineError  # what the launcher raises, with the rank in its message
    time_s: float
    secondary: bool
    signal: int = 0


def describe_exception(rank: int, error: BaseException) -> RankFailure:
    """Return the failure of a rank that raised `error`; only what nobody expected keeps its traceback."""
    match error:
        case RankUnresponsive():
            return RankFailure(error.rank, error, time.time(), secondary=False)
        case UserError():
            raised: PacelineError = UserError(str(error), code=error.code, key=error.key)
        case OutOfMemory():
            raised = OutOfMemory(f"rank {rank}: {error}")
        case PacelineError():
            raised = RunFailed(f"rank {rank}: {error}", code=error.code, key=error.key)
        case _:
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raised = InternalError(f"rank {rank} failed with {message}", "".join(traceback.format_exception(error)))
    return RankFailure(rank, raised, time.time(), is_secondary(error))


def describe_exit(rank: int | str, code: int, time_s: float, secondary: bool, ours: bool = True) -> RankFailure:
    """Return the failure of a process that ended without a report: a rank, or another one that `rank` describes.

    `ours`: whether it runs our own code, which prints a message before it ends.
    """
    number, who = (rank, f"rank {rank}") if isinstance(rank, int) else (0, rank)
    if code >= 0:
        silent = " and left no message" if ours else ""
        message = f"{who} ended with exit code {code}{silent}"
        return RankFailure(number, RunFailed(message, code="rank-failed"), time_s, secondary)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = f" ({SIGNAL_HINTS[-code]}{SIGNAL_OUTPUT.get(-code, '') if ours else ''})" if -code in SIGNAL_HINTS else ""
    message = f"{who} was killed by {name}{hint}"
    if -code != signal.SIGKILL:
        return RankFailure(number, RunFailed(message, code="rank-failed"), time_s, secondary, -code)
    killed = OutOfMemory(message)
    killed.certain = False
    return RankFailure(number, killed, time_s - KILL_NOTICE_S, secondary, -code)


def is_secondary(error: BaseException) -> bool:
    """Return whether an error started with a broken connection or a peer that did not come."""
    origin = [*iter_causes(error)][-1]
    names = {kind.__name__ for kind in type(origin).__mro__}
    return bool(names & SECONDARY_ERROR_TYPES) or (
        isinstance(origin, RuntimeError) and bool(SECONDARY_ERROR_PATTERN.search(str(origin)))
    )


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those it came from, but not those it replaces (`from None`)."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def find_root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the earliest failure that is not secondary, or the earliest of all."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time_s))
