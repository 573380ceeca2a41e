"""Find the rank that the others wait for, and describe what it is doing.

Ranks that wait too long fail with a timeout that does not name the cause. Heartbeats tell what each rank was doing,
and /proc the state of its process, if that is on this machine:

    stopped by a signal              that rank
    behind the others                the rank furthest behind, with its current line
    waiting in another collective    both ranks, with the lines that called different collectives
    waiting in the same collective   no rank: the network between them
"""

import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import RankUnresponsive
from paceline.launch import hang_traces
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import Calls, Frame, Stack, find_pending_call, read_calls, read_stacks, trace_file
from paceline.launch.heartbeat import STOPPED, Beat, Heartbeat, read_beats, read_process_state
from paceline.launch.root_cause import is_secondary, iter_causes

COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
WORKER_CALL = ("_answer", "workers.py")
PREFETCH_CALL = ("load", "prefetch.py")
WAIT_FOR_WRITER_CALL = ("wait", "checkpoint/writer.py")
WRITER_CALL = ("_write", "checkpoint/writer.py")
BACKWARD = "backward"
STOPPED_TEXT = "a signal such as SIGSTOP has stopped"
NO_STACK_TEXT = "; it left no stack: its process did not run, or its machine cannot be reached"
SHOWN_FRAMES = 6
ABORTED_SHARE = 0.9  # of the timeout: a rank that was silent for longer before its abort had waited for another
POLL_EVERY_S = 0.25
GAP_S = 5.0  # a launcher that did not poll for so long was stopped itself, with its ranks: Ctrl-Z
STACK_TIMEOUT_S = 2.0
RECENT_S = 10.0
TIMEOUT_PATTERN = re.compile(r"time[d ]? ?out", re.IGNORECASE)


@contextmanager
def heartbeat_scope(folder: Path, rank_info: RankInfo, timeout_s: float) -> Iterator[Heartbeat]:
    """Write heartbeats of this rank while entered; replace a timeout by an error that names the silent rank."""
    with Heartbeat(folder, rank_info, timeout_s) as beat:
        try:
            yield beat
        except Exception as error:
            if (named := name_silent_rank(error, folder, rank_info)) is error:
                raise
            raise named from error


def name_silent_rank(error: Exception, folder: Path, rank_info: RankInfo) -> Exception:
    """Return an error that names the rank for which this one waited too long; any other error unchanged."""
    if rank_info.world == 1 or isinstance(error, RankUnresponsive):
        return error
    causes = [*iter_causes(error)]
    if not is_secondary(error) or not any(TIMEOUT_PATTERN.search(str(cause)) for cause in causes):
        return error
    asked = trace_file(folder, rank_info.rank, "asked")
    if _file_size(asked) and time.time() - asked.stat().st_mtime < RECENT_S:
        return error  # this rank was the silent one: what it finds broken after it continues is a consequence
    frames = reversed(traceback.extract_tb(causes[-1].__traceback__))
    waiting_in = describe_position(tuple(Frame(f.filename, f.lineno or 0, f.name) for f in frames))
    return _find_awaited(folder, rank_info.rank, waiting_in, rank_info.world) or error


@dataclass(frozen=True)
class WaitingRank:
    """A rank that gave up, and where it waited."""

    beat: Beat
    where: str

    def __str__(self) -> str:
        return f"rank {self.beat.rank} waited{f' in {self.where}' if self.where else ''}, {self.beat.description}"


@dataclass(frozen=True)
class RankPosition:
    """Where a rank that did not give up is, by its stack and its last collectives."""

    beat: Beat
    file: Path
    stack: Stack
    calls: Calls

    @property
    def in_collective(self) -> bool:
        return bool(find_collective(self.stack)) or find_pending_call(self.calls) is not None

    @property
    def where(self) -> str:
        call = find_pending_call(self.calls)
        return describe_position(self.stack) if call is None or find_collective(self.stack) else str(call)


def _find_awaited(folder: Path, rank: int, waiting_in: str | None, world: int | None = None) -> RankUnresponsive | None:
    beats = {beat.rank: beat for beat in read_beats(folder) if world is None or beat.rank < world}
    if (mine := beats.pop(rank, None)) is None:
        return None
    waiting = WaitingRank(mine, _locate_rank(folder, mine).where if waiting_in is None else waiting_in)
    return find_silent_rank(folder, [beat for beat in beats.values() if beat.phase != "failed"], waiting)


def find_silent_rank(folder: Path, others: Sequence[Beat], mine: WaitingRank) -> RankUnresponsive | None:
    """Return the rank that the run waited for, of those that did not give up; None if it is unknown."""
    if stopped := [beat for beat in others if beat.state == STOPPED]:
        return describe_stopped_rank(folder, stopped[0], f"\n  {mine}")
    alive = [beat for beat in others if beat.state or beat.host != mine.beat.host]  # a dead rank is reported as such
    if not alive:
        return None
    last = _find_furthest_behind(folder, alive, mine.beat.host)
    beat, stack = last.beat, last.stack
    who, remote = f"rank {beat.rank} on {beat.host} (pid {beat.pid})", beat.host != mine.beat.host
    same = _in_same_collective(last, mine, read_calls(folder, mine.beat.rank), remote)
    if not (same and remote) and (beat.position < mine.beat.position or (stack and not last.in_collective)):
        at = _describe_worker(beat) or _format_stack(last.file, stack) or NO_STACK_TEXT
        message = f"{who} did not answer in time: it is {beat.description}{at}\n  {mine}"
    elif not same and last.where and mine.where:
        stacks = _format_stack(last.file, stack, f"the stack of rank {beat.rank}")
        message = "the ranks wait for each other in different collectives: "
        message += f"{who} in {last.where}, {beat.description}; {mine}{stacks}"
    elif remote:
        message = f"nothing came from {who} within the timeout of a collective, and both wait in the same one: "
        message += f"look at the network between {beat.host} and {mine.beat.host}\n  {mine}"
    else:
        return None
    return RankUnresponsive(beat.rank, message)


def _find_furthest_behind(folder: Path, beats: Sequence[Beat], host: str) -> RankPosition:
    """Return the rank that is furthest behind.

    In the same step: one outside a collective, then one that called fewer, then one of another machine than `host`.
    """

    def order(rank: RankPosition) -> tuple[object, ...]:
        calls = sum(call.number for call in rank.calls.values())
        return rank.beat.position, rank.in_collective, calls, rank.beat.host == host

    last = min((_locate_rank(folder, beat) for beat in beats), key=order)
    if last.beat.state and not _file_size(last.file):  # it was not silent long enough to write its stack
        return _locate_rank(folder, last.beat, request_stack_file(folder, last.beat))
    return last


def _locate_rank(folder: Path, beat: Beat, file: Path | None = None) -> RankPosition:
    file = file or trace_file(folder, beat.rank, "stack")
    return RankPosition(beat, file, _select_thread(read_stacks(file), beat), read_calls(folder, beat.rank))


def _in_same_collective(last: RankPosition, mine: WaitingRank, calls: Calls, remote: bool) -> bool:
    """Return whether both ranks wait in the same collective; on two machines also in two consecutive ones."""
    theirs, ours = find_pending_call(last.calls), find_pending_call(calls)
    if theirs is None or ours is None:
        return last.where == mine.where
    consecutive = remote and theirs.group == ours.group and abs(theirs.number - ours.number) == 1
    return theirs == ours or consecutive


def describe_stopped_rank(folder: Path, beat: Beat, waited: str = "") -> RankUnresponsive:
    """Return the error for a rank that a signal has stopped; it is continued to write its stack, as the run ends."""
    file = request_stack_file(folder, beat)
    stack = _format_stack(file, _select_thread(read_stacks(file), beat))
    message = f"rank {beat.rank} on {beat.host} (pid {beat.pid}) did not answer in time: {STOPPED_TEXT} it "
    return RankUnresponsive(beat.rank, f"{message}{beat.description}{stack}{waited}")


def request_stack_file(folder: Path, beat: Beat) -> Path:
    file = trace_file(folder, beat.rank, "asked")
    if not file.is_file():
        return file
    with suppress(OSError):
        hang_traces.request_stack(beat.pid)
        os.kill(beat.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_TIMEOUT_S
    while time.monotonic() < deadline and not _file_size(file):
        time.sleep(0.02)
    time.sleep(0.05)  # for the rest of it
    return file


@dataclass
class ProcessMonitor:
    """Watch the processes of the ranks for the launcher: one that stays stopped ends the run."""

    folder: Path
    timeout_s: float
    after_s: float = 2.0  # so much longer: peers that wait for the rank report it first, and know where
    _since: dict[int, float] = field(default_factory=dict)
    _polled_s: float = 0.0

    def find_stopped(self, pids: Mapping[int, int]) -> list[int]:
        """Return the processes that have been stopped for longer than the timeout of a collective."""
        now = time.monotonic()
        if now - self._polled_s < POLL_EVERY_S:
            return []
        if now - self._polled_s > GAP_S:
            self._since.clear()
        self._polled_s = now
        stopped = [number for number, pid in pids.items() if read_process_state(pid)[0] == STOPPED]
        self._since = {number: self._since.get(number, now) for number in stopped}
        return [number for number, since in self._since.items() if now - since >= self.timeout_s + self.after_s]

    def find_awaited(self, rank: int) -> RankUnresponsive | None:
        """Return the rank that an aborted one waited for: NCCL aborts a process after the timeout."""
        mine = next((beat for beat in read_beats(self.folder) if beat.rank == rank), None)
        if mine is None or time.time() - mine.t < ABORTED_SHARE * self.timeout_s:
            return None
        return _find_awaited(self.folder, rank, None)

    def describe_stopped(self, rank: int, pid: int) -> RankUnresponsive:
        for beat in read_beats(self.folder):
            if beat.rank == rank and beat.pid == pid:
                return describe_stopped_rank(self.folder, beat)
        message = f"rank {rank} (pid {pid}) did not answer in time: {STOPPED_TEXT} it while it started"
        return RankUnresponsive(rank, message)


def describe_position(stack: Stack) -> str:
    """Return the collective that a stack is in, if any, and the line of our or the user's code that called it."""
    own = next((frame for frame in stack if not frame.library), None)
    called = find_collective(stack)
    if own is None:
        return called
    at = f"{own.function} ({os.path.basename(own.file)}:{own.line})"
    return f"{called}, called by {at}" if called and called != own.function else at


def find_collective(stack: Stack) -> str:
    """Return the outermost function of torch.distributed among the newest calls; "" outside a collective."""
    found = ""
    for frame in stack:
        if not frame.library:
            break
        if frame.file.endswith(COLLECTIVES_FILE):
            found = frame.function
    in_backward = any(frame.function == BACKWARD and frame.library for frame in stack[:SHOWN_FRAMES])
    return found or (BACKWARD if in_backward else "")


def _select_thread(threads: Sequence[Stack], beat: Beat) -> Stack:
    """Return the thread that the rank waits for: its main one, or the one that loads data or writes a checkpoint."""
    main = threads[0] if threads else ()
    writing = WRITER_CALL if _contains_call(main, WAIT_FOR_WRITER_CALL) else None
    call = PREFETCH_CALL if beat.phase == "data" else writing
    return next((stack for stack in threads[1:] if call and _contains_call(stack, call)), main)


def _contains_call(stack: Stack, call: tuple[str, str]) -> bool:
    function, file = call
    return any(frame.function == function and frame.file.endswith(file) for frame in stack)


def _describe_worker(beat: Beat) -> str:
    if not beat.state or beat.phase not in ("start", "data", "evaluation"):
        return ""
    for pid in hang_traces.list_children(beat.pid):
        if read_process_state(pid)[0] == STOPPED:
            return f"; {STOPPED_TEXT} its data worker (pid {pid})"
        for stack in hang_traces.fetch_stacks(pid):
            if _contains_call(stack, WORKER_CALL):
                return f"; its data worker (pid {pid}) is at, the newest call first:{_format_frames(stack)}"
    return ""


def _format_stack(file: Path, stack: Stack, whose: str = "its stack") -> str:
    if not stack:
        return ""
    return f"; {whose}, the newest call first (all of it: {file}):{_format_frames(stack)}"


def _format_frames(stack: Stack) -> str:
    first = next((i for i, frame in enumerate(stack) if not frame.library), 0)
    return "".join(f"\n    {frame}" for frame in stack[max(0, first - 1) :][:SHOWN_FRAMES])


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
