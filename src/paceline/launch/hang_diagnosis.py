"""A rank that does not answer: which one, where it is, and who waited for it in what.

Those that waited fail with an error of their own connection, which is true and of no use. What each rank was at stands
in its heartbeat, and the state of its process in /proc, if that is on this machine:

    stopped by a signal              that one
    behind the others                the one furthest behind, with the line that it is at
    waiting, but somewhere else      ranks that called different collectives: both lines
    waiting in the same place        nobody: the network between them
"""

from __future__ import annotations

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
from paceline.launch import root_cause
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import (
    Calls,
    Frame,
    Stack,
    count_calls,
    fetch_stacks,
    find_pending_call,
    list_children,
    read_calls,
    read_stacks,
    request_stack,
    stack_file,
)
from paceline.launch.heartbeat import STOPPED, Beat, Heartbeat, read_beats, read_process_state

COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
CHECKPOINT_WRITER_FILE = "checkpoints/writer.py"
BACKWARD = "backward"
STOPPED_TEXT = "a signal such as SIGSTOP has stopped it"
NO_STACK_TEXT = "; it left no stack: its process did not run, or its machine cannot be reached"
SHOWN_FRAMES = 6
"""Frames of a stack in a message; its file has them all."""
ABORTED_SHARE = 0.9
"""Of the time that a collective may take: who was silent for longer before it was aborted had waited for another."""
POLL_EVERY_S = 0.25
GAP_S = 5.0
"""If we did not look for so long, we were stopped ourselves, with all the others: Ctrl-Z."""
STACK_TIMEOUT_S = 2.0
"""For a rank to leave its stack when it is asked."""
RECENT_S = 10.0
TIMEOUT_PATTERN = re.compile(r"time[d ]? ?out", re.IGNORECASE)


@contextmanager
def heartbeat_scope(folder: Path, place: RankInfo, timeout_s: float) -> Iterator[Heartbeat]:
    """While entered this rank leaves heartbeats; at the end, if it waited for another in vain, it says for whom."""
    with Heartbeat(folder, place, timeout_s) as beat:
        try:
            yield beat
        except Exception as error:
            if (told := name_silent_rank(error, folder, place)) is error:
                raise
            raise told from error


def name_silent_rank(error: Exception, folder: Path, place: RankInfo) -> Exception:
    """The error of a rank that waited in vain, as one that names whom it waited for; any other error as it is."""
    if (
        place.world == 1
        or isinstance(error, RankUnresponsive)
        or not (root_cause.is_secondary(error) and _is_timeout(error))
    ):
        return error
    beats = {beat.rank: beat for beat in read_beats(folder) if beat.rank < place.world}
    if (mine := beats.pop(place.rank, None)) is None or _was_asked_recently(folder, place.rank):
        return error
    waiting = WaitingRank(mine, describe_position(_extract_stack(error)))
    return find_silent_rank(folder, [beat for beat in beats.values() if beat.phase != "failed"], waiting) or error


@dataclass(frozen=True)
class WaitingRank:
    """A rank that gave up, and where it waited: the collective and the line that called it, in words."""

    beat: Beat
    where: str

    def __str__(self) -> str:
        return f"rank {self.beat.rank} waited{f' in {self.where}' if self.where else ''}, {self.beat.place}"


@dataclass(frozen=True)
class RankPosition:
    """Where a rank that did not give up is, by what it has left."""

    beat: Beat
    file: Path
    """Of its stack."""
    stack: Stack
    calls: Calls

    @property
    def in_collective(self) -> bool:
        """Whether it is in a collective itself."""
        return bool(find_collective(self.stack)) or find_pending_call(self.calls) is not None

    @property
    def where(self) -> str:
        call = find_pending_call(self.calls)
        return describe_position(self.stack) if call is None or find_collective(self.stack) else str(call)


def find_silent_rank(folder: Path, others: Sequence[Beat], mine: WaitingRank) -> RankUnresponsive | None:
    """Of the ranks that did not give up, the one that the run waited for."""
    if stopped := [beat for beat in others if beat.state == STOPPED]:
        return describe_stopped_rank(folder, stopped[0], f"\n  {mine}")
    there = [beat for beat in others if beat.state or beat.host != mine.beat.host]  # else it died: another story
    if not there:
        return None
    last = _find_furthest_behind(folder, there, mine.beat.host)
    beat, stack = last.beat, last.stack
    who = f"rank {beat.rank} on {beat.host} (pid {beat.pid})"
    called, far = _describe_calls(folder, beat, mine.beat), beat.host != mine.beat.host
    same = _in_same_collective(last, mine, read_calls(folder, mine.beat.rank), far)
    if not (same and far) and (beat.position < mine.beat.position or (stack and not last.in_collective)):
        at = _describe_worker(beat) or _format_stack(last.file, stack) or NO_STACK_TEXT
        return RankUnresponsive(beat.rank, f"{who} did not answer in time: it is {beat.place}{at}\n  {mine}{called}")
    if not same and last.where and mine.where:
        said = f"the ranks wait for each other in different collectives: {who} in {last.where}, {beat.place}; {mine}"
        return RankUnresponsive(
            beat.rank, f"{said}{_format_stack(last.file, stack, f'the stack of rank {beat.rank}')}{called}"
        )
    if not far:
        return None
    said = f"nothing came from {who} for as long as a collective may take, and both wait in the same place"
    return RankUnresponsive(
        beat.rank, f"{said}: look at the network between {beat.host} and {mine.beat.host}\n  {mine}"
    )


def _find_furthest_behind(folder: Path, beats: Sequence[Beat], near: str) -> RankPosition:
    """Of ranks that are equally far, one that waits for nobody, then one that called fewer collectives, and of those
    that wait in the same place one on another machine than `near`: what lies between may be the cause."""

    def order(one: RankPosition) -> tuple[object, ...]:
        return one.beat.position, one.in_collective, count_calls(one.calls), one.beat.host == near

    last = min((_locate_rank(folder, beat) for beat in beats), key=order)
    if last.beat.state and not _file_size(last.file):  # not silent for as long as the others waited
        return _locate_rank(folder, last.beat, request_stack_file(folder, last.beat))
    return last


def _locate_rank(folder: Path, beat: Beat, file: Path | None = None) -> RankPosition:
    file = file or stack_file(folder, beat.rank)
    return RankPosition(beat, file, _select_thread(read_stacks(file), beat), read_calls(folder, beat.rank))


def _in_same_collective(last: RankPosition, mine: WaitingRank, calls: Calls, far: bool) -> bool:
    """Whether both wait in the same collective; from afar, also in two that follow each other: where a link is cut, the
    last message may have come through in one direction alone."""
    theirs, ours = find_pending_call(last.calls), find_pending_call(calls)
    if theirs is None or ours is None:
        return last.where == mine.where
    follows = far and theirs.group == ours.group and abs(theirs.number - ours.number) == 1
    return theirs == ours or follows


def _describe_calls(folder: Path, *beats: Beat) -> str:
    """The last collectives of two ranks, in words, where torch has kept them and they differ."""
    one, other = (read_calls(folder, beat.rank) for beat in beats)
    for group in sorted(one.keys() & other.keys()):
        if (one[group].number, one[group].name) != (other[group].number, other[group].name):
            said = (f"rank {beat.rank} {calls[group]}" for beat, calls in zip(beats, (one, other), strict=True))
            return f"\n  the last that they called: {'; '.join(said)}"
    return ""


def describe_stopped_rank(folder: Path, beat: Beat, waited: str = "") -> RankUnresponsive:
    """A rank that a signal has stopped. The run ends for it, so it may run again: that is how it leaves its stack."""
    file = request_stack_file(folder, beat)
    said = f"rank {beat.rank} on {beat.host} (pid {beat.pid}) did not answer in time: {STOPPED_TEXT} {beat.place}"
    return RankUnresponsive(beat.rank, f"{said}{_format_stack(file, _select_thread(read_stacks(file), beat))}{waited}")


def request_stack_file(folder: Path, beat: Beat) -> Path:
    """Where a rank of this machine writes its stack, if it can, now that it is asked to."""
    file = stack_file(folder, beat.rank, asked=True)
    if not file.is_file():
        return file
    with suppress(OSError):
        request_stack(beat.pid)
        os.kill(beat.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_TIMEOUT_S
    while time.monotonic() < deadline and not _file_size(file):
        time.sleep(0.02)
    time.sleep(0.05)  # for the rest of it
    return file


@dataclass
class ProcessMonitor:
    """The launcher's eye on the processes of its ranks: one that stays stopped ends the run, whatever the others do."""

    folder: Path
    timeout_s: float
    after_s: float = 2.0
    """The others come first, if they wait for it: they can say in what."""
    _since: dict[int, float] = field(default_factory=dict)
    _looked: float = 0.0

    def stopped(self, pids: Mapping[int, int]) -> list[int]:
        """Those of the processes that have been stopped for longer than a collective may take."""
        now = time.monotonic()
        if now - self._looked < POLL_EVERY_S:
            return []
        if now - self._looked > GAP_S:
            self._since.clear()
        self._looked = now
        still = {number: pid for number, pid in pids.items() if read_process_state(pid)[0] == STOPPED}
        self._since = {number: self._since.get(number, now) for number in still}
        return [number for number, since in self._since.items() if now - since >= self.timeout_s + self.after_s]

    def waited_for(self, rank: int) -> RankUnresponsive | None:
        """Whom a rank waited for that has ended without a word: NCCL aborts a process whose time is over."""
        beats = {beat.rank: beat for beat in read_beats(self.folder)}
        mine = beats.pop(rank, None)
        if mine is None or time.time() - mine.t < ABORTED_SHARE * self.timeout_s:
            return None
        waiting = WaitingRank(mine, _locate_rank(self.folder, mine).where)
        return find_silent_rank(self.folder, [beat for beat in beats.values() if beat.phase != "failed"], waiting)

    def why(self, rank: int, pid: int) -> RankUnresponsive:
        for beat in read_beats(self.folder):
            if beat.rank == rank and beat.pid == pid:
                return describe_stopped_rank(self.folder, beat)
        return RankUnresponsive(
            rank, f"rank {rank} (pid {pid}) did not answer in time: {STOPPED_TEXT} while it started"
        )


def describe_position(stack: Stack) -> str:
    """The collective that a stack is in, if it is, and the line of ours or the user's that came to it."""
    own = next((frame for frame in stack if not frame.library), None)
    called = find_collective(stack)
    if own is None:
        return called
    at = f"{own.function} ({os.path.basename(own.file)}:{own.line})"
    return f"{called}, called by {at}" if called and called != own.function else at


def find_collective(stack: Stack) -> str:
    """The outermost function of torch.distributed that the newest calls went through; empty outside of any."""
    found = ""
    for frame in stack:
        if not frame.library:
            break
        if frame.file.endswith(COLLECTIVES_FILE):
            found = frame.function
    in_backward = any(frame.function == BACKWARD and frame.library for frame in stack[:SHOWN_FRAMES])
    return found or (BACKWARD if in_backward else "")


def _select_thread(threads: Sequence[Stack], beat: Beat) -> Stack:
    """The thread that the rank waits for: its main one, or the one that makes its samples or writes its checkpoint."""
    main = threads[0] if threads else ()
    if beat.phase == "data":
        helpers = [stack for stack in threads[1:] if _contains_call(stack, "load", "prefetch.py")]
    elif _contains_call(main, "wait", CHECKPOINT_WRITER_FILE):
        helpers = [stack for stack in threads[1:] if _contains_call(stack, "_write", CHECKPOINT_WRITER_FILE)]
    else:
        helpers = []
    return helpers[0] if helpers else main


def _contains_call(stack: Stack, function: str, file: str) -> bool:
    return any(frame.function == function and frame.file.endswith(file) for frame in stack)


def _describe_worker(beat: Beat) -> str:
    """The data worker that keeps a rank of this machine waiting, in words; empty where there is none."""
    if not beat.state or beat.phase not in ("start", "data", "evaluation"):
        return ""
    for pid in list_children(beat.pid):
        if read_process_state(pid)[0] == STOPPED:
            return f"; {STOPPED_TEXT.replace('it', f'its data worker (pid {pid})')}"
        for stack in fetch_stacks(pid):
            if _contains_call(stack, "_answer", "workers.py"):
                return f"; its data worker (pid {pid}) is at, the newest call first:{_format_frames(stack)}"
    return ""


def _format_stack(file: Path, stack: Stack, whose: str = "its stack") -> str:
    if not stack:
        return ""
    return f"; {whose}, the newest call first (all of it: {file}):{_format_frames(stack)}"


def _format_frames(stack: Stack) -> str:
    first = next((i for i, frame in enumerate(stack) if not frame.library), 0)
    return "".join(f"\n    {frame}" for frame in stack[max(0, first - 1) :][:SHOWN_FRAMES])


def _extract_stack(error: BaseException) -> Stack:
    """Of where it began."""
    found = traceback.extract_tb([*root_cause.iter_causes(error)][-1].__traceback__)
    return tuple(Frame(one.filename, one.lineno or 0, one.name) for one in reversed(found))


def _is_timeout(error: BaseException) -> bool:
    return any(TIMEOUT_PATTERN.search(str(one)) for one in root_cause.iter_causes(error))


def _was_asked_recently(folder: Path, rank: int) -> bool:
    """Whether another rank wanted to know where this one is: then it was this one that did not answer, and what it
    finds broken now that it goes on is no news."""
    file = stack_file(folder, rank, asked=True)
    return _file_size(file) > 0 and time.time() - file.stat().st_mtime < RECENT_S


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
