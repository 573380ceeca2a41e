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

from paceline.errors import RankSilent
from paceline.launch import blame
from paceline.launch.environment import Place
from paceline.launch.flight import Calls, in_flight, read_calls, so_far
from paceline.launch.heartbeat import STOPPED, Beat, Heartbeat, process_state, read_beats
from paceline.launch.stacks import Frame, Stack, ask, asked_of, children, read_stacks, stack_file

COLLECTIVES = "torch/distributed/distributed_c10d.py"
WRITER = "checkpoints/writer.py"
BACKWARD = "backward"
BY_SIGNAL = "a signal such as SIGSTOP has stopped it"
NO_STACK = "; it left no stack: its process did not run, or its machine cannot be reached"
SHOWN = 6
"""Frames of a stack in a message; its file has them all."""
ABORTED = 0.9
"""Of the time that a collective may take: who was silent for longer before it was aborted had waited for another."""
LOOK_EVERY_S = 0.25
GAP_S = 5.0
"""If we did not look for so long, we were stopped ourselves, with all the others: Ctrl-Z."""
STACK_S = 2.0
"""For a rank to leave its stack when it is asked."""
LATELY_S = 10.0
TIMED_OUT = re.compile(r"time[d ]? ?out", re.IGNORECASE)


@contextmanager
def heard(folder: Path, place: Place, timeout_s: float) -> Iterator[Heartbeat]:
    """While entered this rank leaves heartbeats; at the end, if it waited for another in vain, it says for whom."""
    with Heartbeat(folder, place, timeout_s) as beat:
        try:
            yield beat
        except Exception as error:
            if (told := named(error, folder, place)) is error:
                raise
            raise told from error


def named(error: Exception, folder: Path, place: Place) -> Exception:
    """The error of a rank that waited in vain, as one that names whom it waited for; any other error as it is."""
    if place.world == 1 or isinstance(error, RankSilent) or not (blame.is_echo(error) and _timed_out(error)):
        return error
    beats = {beat.rank: beat for beat in read_beats(folder) if beat.rank < place.world}
    if (mine := beats.pop(place.rank, None)) is None or _asked_lately(folder, place.rank):
        return error
    waiting = Waiting(mine, where(_stack_of(error)))
    return find(folder, [beat for beat in beats.values() if beat.phase != "failed"], waiting) or error


@dataclass(frozen=True)
class Waiting:
    """A rank that gave up, and where it waited: the collective and the line that called it, in words."""

    beat: Beat
    where: str

    def __str__(self) -> str:
        return f"rank {self.beat.rank} waited{f' in {self.where}' if self.where else ''}, {self.beat.place}"


@dataclass(frozen=True)
class Standing:
    """Where a rank that did not give up is, by what it has left."""

    beat: Beat
    file: Path
    """Of its stack."""
    stack: Stack
    calls: Calls

    @property
    def waits(self) -> bool:
        """Whether it is in a collective itself."""
        return bool(collective(self.stack)) or in_flight(self.calls) is not None

    @property
    def where(self) -> str:
        call = in_flight(self.calls)
        return where(self.stack) if call is None or collective(self.stack) else str(call)


def find(folder: Path, others: Sequence[Beat], mine: Waiting) -> RankSilent | None:
    """Of the ranks that did not give up, the one that the run waited for."""
    if stopped := [beat for beat in others if beat.state == STOPPED]:
        return stopped_rank(folder, stopped[0], f"\n  {mine}")
    there = [beat for beat in others if beat.state or beat.host != mine.beat.host]  # else it died: another story
    if not there:
        return None
    last = _furthest_behind(folder, there, mine.beat.host)
    beat, stack = last.beat, last.stack
    who = f"rank {beat.rank} on {beat.host} (pid {beat.pid})"
    called, far = _called(folder, beat, mine.beat), beat.host != mine.beat.host
    same = _same_place(last, mine, read_calls(folder, mine.beat.rank), far)
    if not (same and far) and (beat.position < mine.beat.position or (stack and not last.waits)):
        at = _in_worker(beat) or _shown(last.file, stack) or NO_STACK
        return RankSilent(beat.rank, f"{who} did not answer in time: it is {beat.place}{at}\n  {mine}{called}")
    if not same and last.where and mine.where:
        said = f"the ranks wait for each other in different collectives: {who} in {last.where}, {beat.place}; {mine}"
        return RankSilent(beat.rank, f"{said}{_shown(last.file, stack, f'the stack of rank {beat.rank}')}{called}")
    if not far:
        return None
    said = f"nothing came from {who} for as long as a collective may take, and both wait in the same place"
    return RankSilent(beat.rank, f"{said}: look at the network between {beat.host} and {mine.beat.host}\n  {mine}")


def _furthest_behind(folder: Path, beats: Sequence[Beat], near: str) -> Standing:
    """Of ranks that are equally far, one that waits for nobody, then one that called fewer collectives, and of those
    that wait in the same place one on another machine than `near`: what lies between may be the cause."""

    def order(one: Standing) -> tuple[object, ...]:
        return one.beat.position, one.waits, so_far(one.calls), one.beat.host == near

    last = min((_standing(folder, beat) for beat in beats), key=order)
    if last.beat.state and not _size(last.file):  # not silent for as long as the others waited
        return _standing(folder, last.beat, asked_for(folder, last.beat))
    return last


def _standing(folder: Path, beat: Beat, file: Path | None = None) -> Standing:
    file = file or stack_file(folder, beat.rank)
    return Standing(beat, file, _relevant(read_stacks(file), beat), read_calls(folder, beat.rank))


def _same_place(last: Standing, mine: Waiting, calls: Calls, far: bool) -> bool:
    """Whether both wait in the same collective; from afar, also in two that follow each other: where a link is cut, the
    last message may have come through in one direction alone."""
    theirs, ours = in_flight(last.calls), in_flight(calls)
    if theirs is None or ours is None:
        return last.where == mine.where
    follows = far and theirs.group == ours.group and abs(theirs.number - ours.number) == 1
    return theirs == ours or follows


def _called(folder: Path, *beats: Beat) -> str:
    """The last collectives of two ranks, in words, where torch has kept them and they differ."""
    one, other = (read_calls(folder, beat.rank) for beat in beats)
    for group in sorted(one.keys() & other.keys()):
        if (one[group].number, one[group].name) != (other[group].number, other[group].name):
            said = (f"rank {beat.rank} {calls[group]}" for beat, calls in zip(beats, (one, other), strict=True))
            return f"\n  the last that they called: {'; '.join(said)}"
    return ""


def stopped_rank(folder: Path, beat: Beat, waited: str = "") -> RankSilent:
    """A rank that a signal has stopped. The run ends for it, so it may run again: that is how it leaves its stack."""
    file = asked_for(folder, beat)
    said = f"rank {beat.rank} on {beat.host} (pid {beat.pid}) did not answer in time: {BY_SIGNAL} {beat.place}"
    return RankSilent(beat.rank, f"{said}{_shown(file, _relevant(read_stacks(file), beat))}{waited}")


def asked_for(folder: Path, beat: Beat) -> Path:
    """Where a rank of this machine writes its stack, if it can, now that it is asked to."""
    file = stack_file(folder, beat.rank, asked=True)
    if not file.is_file():
        return file
    with suppress(OSError):
        ask(beat.pid)
        os.kill(beat.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_S
    while time.monotonic() < deadline and not _size(file):
        time.sleep(0.02)
    time.sleep(0.05)  # for the rest of it
    return file


@dataclass
class Watch:
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
        if now - self._looked < LOOK_EVERY_S:
            return []
        if now - self._looked > GAP_S:
            self._since.clear()
        self._looked = now
        still = {number: pid for number, pid in pids.items() if process_state(pid)[0] == STOPPED}
        self._since = {number: self._since.get(number, now) for number in still}
        return [number for number, since in self._since.items() if now - since >= self.timeout_s + self.after_s]

    def waited_for(self, rank: int) -> RankSilent | None:
        """Whom a rank waited for that has ended without a word: NCCL aborts a process whose time is over."""
        beats = {beat.rank: beat for beat in read_beats(self.folder)}
        mine = beats.pop(rank, None)
        if mine is None or time.time() - mine.t < ABORTED * self.timeout_s:
            return None
        waiting = Waiting(mine, _standing(self.folder, mine).where)
        return find(self.folder, [beat for beat in beats.values() if beat.phase != "failed"], waiting)

    def why(self, rank: int, pid: int) -> RankSilent:
        for beat in read_beats(self.folder):
            if beat.rank == rank and beat.pid == pid:
                return stopped_rank(self.folder, beat)
        return RankSilent(rank, f"rank {rank} (pid {pid}) did not answer in time: {BY_SIGNAL} while it started")


def where(stack: Stack) -> str:
    """The collective that a stack is in, if it is, and the line of ours or the user's that came to it."""
    own = next((frame for frame in stack if not frame.library), None)
    called = collective(stack)
    if own is None:
        return called
    at = f"{own.function} ({os.path.basename(own.file)}:{own.line})"
    return f"{called}, called by {at}" if called and called != own.function else at


def collective(stack: Stack) -> str:
    """The outermost function of torch.distributed that the newest calls went through; empty outside of any."""
    found = ""
    for frame in stack:
        if not frame.library:
            break
        if frame.file.endswith(COLLECTIVES):
            found = frame.function
    in_backward = any(frame.function == BACKWARD and frame.library for frame in stack[:SHOWN])
    return found or (BACKWARD if in_backward else "")


def _relevant(threads: Sequence[Stack], beat: Beat) -> Stack:
    """The thread that the rank waits for: its main one, or the one that makes its samples or writes its checkpoint."""
    main = threads[0] if threads else ()
    if beat.phase == "data":
        helpers = [stack for stack in threads[1:] if _goes_through(stack, "load", "prefetch.py")]
    elif _goes_through(main, "wait", WRITER):
        helpers = [stack for stack in threads[1:] if _goes_through(stack, "_write", WRITER)]
    else:
        helpers = []
    return helpers[0] if helpers else main


def _goes_through(stack: Stack, function: str, file: str) -> bool:
    return any(frame.function == function and frame.file.endswith(file) for frame in stack)


def _in_worker(beat: Beat) -> str:
    """The data worker that keeps a rank of this machine waiting, in words; empty where there is none."""
    if not beat.state or beat.phase not in ("start", "data", "evaluation"):
        return ""
    for pid in children(beat.pid):
        if process_state(pid)[0] == STOPPED:
            return f"; {BY_SIGNAL.replace('it', f'its data worker (pid {pid})')}"
        for stack in asked_of(pid):
            if _goes_through(stack, "_answer", "workers.py"):
                return f"; its data worker (pid {pid}) is at, the newest call first:{_lines(stack)}"
    return ""


def _shown(file: Path, stack: Stack, whose: str = "its stack") -> str:
    if not stack:
        return ""
    return f"; {whose}, the newest call first (all of it: {file}):{_lines(stack)}"


def _lines(stack: Stack) -> str:
    first = next((i for i, frame in enumerate(stack) if not frame.library), 0)
    return "".join(f"\n    {frame}" for frame in stack[max(0, first - 1) :][:SHOWN])


def _stack_of(error: BaseException) -> Stack:
    """Of where it began."""
    found = traceback.extract_tb([*blame.chain(error)][-1].__traceback__)
    return tuple(Frame(one.filename, one.lineno or 0, one.name) for one in reversed(found))


def _timed_out(error: BaseException) -> bool:
    return any(TIMED_OUT.search(str(one)) for one in blame.chain(error))


def _asked_lately(folder: Path, rank: int) -> bool:
    """Whether another rank wanted to know where this one is: then it was this one that did not answer, and what it
    finds broken now that it goes on is no news."""
    file = stack_file(folder, rank, asked=True)
    return _size(file) > 0 and time.time() - file.stat().st_mtime < LATELY_S


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
