"""Record the steps of a script as the events that our own runs write.

A note is a plain tuple, and all sums wait until steps are written: a line of Python that runs between two layers of a
model finds the caches of the processor full of it, and takes several times as long as among others of its kind.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import ReferenceType, ref

from paceline.errors import UserError
from paceline.launch.environment import detect_rank
from paceline.measurement.scripts.command import RecordRequest
from paceline.runlog.events import EventWriter
from paceline.runlog.timers import Interval, build_timer, count_compilations, subtract_waiting, sum_union

FLIGHT = "flight"
"""A collective, from the call until the result is there."""
WAIT = "wait"
"""For a collective: this rank could do nothing else."""
BLOCKING = "blocking"
"""A collective that was waited for from its start."""
BUCKET = "bucket"
"""The flight of gradients; with it stands which backward pass they belong to."""
INPUT = "input"
"""Waiting for a batch; with it stands how many samples it has."""
Note = tuple[str, Any, Any, Any]
"""What, the marks of its begin and end, and what belongs to it."""
Seconds = Callable[[list[tuple[Any, Any]]], list[Interval]]
"""Reads pairs of marks."""


@dataclass(slots=True)
class RecordedStep:
    number: int
    t: float
    """When it ended, since 1970."""
    begin: Any
    end: Any
    compiled: bool
    """Whether something was compiled during it."""
    watched: bool
    """Whether buckets were noted."""
    notes: list[Note]

    def times(self, seconds: Seconds, comm_s: float, exposed_s: float) -> dict[str, Any]:
        """As the event of a step has them, given its communication."""
        ((begin_s, end_s),) = seconds([(self.begin, self.end)])
        step_s = end_s - begin_s
        data_s = sum_union(self._of(seconds, INPUT))
        comm_s, exposed_s = min(comm_s, step_s), min(exposed_s, step_s)
        return {
            "step_s": step_s,
            "data_s": data_s,
            "compute_s": subtract_waiting(step_s, data_s, exposed_s),
            "comm_s": comm_s,
            "exposed_s": exposed_s,
            "rank_batch": sum(note[3] for note in self.notes if note[0] == INPUT),
        }

    def communication(self, seconds: Seconds) -> tuple[float, float]:
        """(comm_s, exposed_s)"""
        comm_s = sum_union(self._of(seconds, FLIGHT, BLOCKING, BUCKET))
        return comm_s, min(comm_s, sum_union([*self._of(seconds, WAIT, BLOCKING), *self._tails(seconds)]))

    @property
    def with_buckets(self) -> bool:
        return any(note[0] == BUCKET for note in self.notes)

    def _of(self, seconds: Seconds, *kinds: str) -> list[Interval]:
        """Without those that began by another clock, that of the host, before the device was known."""
        return seconds(
            [(begin, end) for kind, begin, end, _ in self.notes if kind in kinds and _is_same_clock(begin, end)]
        )

    def _tails(self, seconds: Seconds) -> list[Interval]:
        """After the last bucket of a backward pass there is nothing left to compute: what is in flight from then on is
        waited for."""
        passes: defaultdict[Any, list[tuple[Any, Any]]] = defaultdict(list)
        for kind, begin, end, backward in self.notes:
            if kind == BUCKET and _is_same_clock(begin, end):
                passes[backward].append((begin, end))
        flights = [seconds(of_pass) for of_pass in passes.values()]
        return [(max(begin for begin, _ in buckets), max(end for _, end in buckets)) for buckets in flights]


def _is_same_clock(begin: Any, end: Any) -> bool:
    return type(begin) is type(end)


class SeveralOptimizers(Exception):
    """Two optimisers step in turn, and nobody said which of them ends a step."""

    def __init__(self, names: list[str], last: str) -> None:
        self.names, self.last = names, last


class StepTracker:
    """Follows the calls of `step`, of which some are made inside others: an optimiser may wrap another."""

    def __init__(self, steps_by: str = "") -> None:
        self.steps_by = steps_by
        self.names: list[str] = []
        """Adam, Adam-2, …: in the order of their first steps."""
        self._name_of: dict[ReferenceType[Any], str] = {}
        self._last = ""
        self._inside: list[Any] = []

    def begins(self, optimizer: Any) -> None:
        self._leave(optimizer)  # it may be there still: a step that raised an exception has no end
        self._inside.append(optimizer)

    def ends(self, optimizer: Any) -> bool:
        """Whether a step of the script ends with this call."""
        self._leave(optimizer)
        if self._inside:
            return False
        name = self._name_of.get(ref(optimizer)) or self._named(optimizer)
        if self.steps_by:
            return name == self.steps_by
        again = name != self._last and self._stepped_before(name)
        self._last, last = name, self._last
        if again:
            raise SeveralOptimizers(self.names, last)
        return True

    def _stepped_before(self, name: str) -> bool:
        return bool(self._last) and self.names.index(name) < self.names.index(self._last)

    def _leave(self, optimizer: Any) -> None:
        if optimizer in self._inside:
            del self._inside[self._inside.index(optimizer) :]

    def _named(self, optimizer: Any) -> str:
        kind = type(optimizer).__name__
        same = sum(name.partition("-")[0] == kind for name in self.names)
        self.names.append(f"{kind}-{same + 1}" if same else kind)
        self._name_of[ref(optimizer)] = self.names[-1]
        return self.names[-1]


READ_LATER = 50
"""Steps after which the marks of one are read on a device."""
TOGETHER = 50
"""Steps that are written at once: one by one, with a processor whose caches hold the model, each would take three times
as long."""
WATCHED = 4
"""After the first few, one step in so many has its gradient buckets noted, which makes a step of 20 ms longer by 2 to
4 %. Those between stay as they are."""
PEERS_S = 10.0
"""For which a rank that is done waits for the others: they may still need its answers."""
REFUSED = 3
"""Exit code."""


class StepRecorder:
    def __init__(self, request: RecordRequest) -> None:
        self.request = request
        self.workers: int | None = None
        """Processes that made the last batch."""
        self.aside = False
        """Whether collectives were seen in a stream of their own, where their waits cannot be told."""
        self.watching = True
        """Whether gradient buckets are noted in the present step."""
        self.watchers: list[Callable[[bool], None]] = []
        """Called when that changes."""
        self.noted: list[Note] = []
        """In the present step, from any thread."""
        self._clock = build_timer("cpu")
        self.mark = self._clock.now
        self._ends = StepTracker(request.steps_by)
        self._begin: Any = None
        self._compilations = 0
        self._done: deque[RecordedStep] = deque()
        self._of_buckets: tuple[float, float] | None = None
        self._steps = 0
        self._events: EventWriter | None = None
        self._device = "cpu"

    def note(self, kind: str, begin: Any, detail: Any = None) -> None:
        """Something that began at a mark is over."""
        self.noted.append((kind, begin, self.mark(), detail))

    def optimizer_begins(self, optimizer: Any, *call: Any) -> None:
        self._ends.begins(optimizer)

    def optimizer_ended(self, optimizer: Any, *call: Any) -> None:
        try:
            if not self._ends.ends(optimizer):
                return
        except SeveralOptimizers as several:
            names = " and ".join(several.names)
            self.refuse(
                f"the script steps with {len(several.names)} optimisers in turn, {names}; say which of them ends a "
                f"step, as in  --steps-by {several.last}",
                on_any_ranks=True,
            )
        if self._events is None:
            self._start(optimizer)
        begin, end = self._begin, self.mark()
        notes, self.noted, self._begin = self.noted, [], end
        before, self._compilations = self._compilations, count_compilations()
        if begin is None:
            return
        self._steps += 1
        compiled = self._compilations > before
        self._done.append(RecordedStep(self._steps, time.time(), begin, end, compiled, self.watching, notes))
        self._watch(self._steps < WATCHED or self._steps % WATCHED == 0)
        leave = READ_LATER if self._device == "cuda" else 0
        if len(self._done) >= leave + TOGETHER:
            self._write(leave)
        if self._steps >= self.request.steps:
            self._end_here()

    def _watch(self, watching: bool) -> None:
        if watching != self.watching:
            self.watching = watching
            for tell in self.watchers:
                tell(watching)

    def _start(self, optimizer: Any) -> None:
        """At the first step it is known where the model is, and who else takes part."""
        import torch

        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = find_rank_and_world()
        if self.request.ranks > 1 and not joined:
            self.refuse(
                "the ranks had not joined a process group of torch.distributed at their first step: each of them "
                "trains by itself, or they exchange gradients in a way that cannot be seen"
            )
        if world != self.request.ranks:
            self.refuse(describe_rank_mismatch(self.request.ranks, world))
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._device = next((p.device.type for p in parameters), "cpu")
        self._clock = build_timer(self._device)
        self.mark = self._clock.now
        cuda = self._device == "cuda"
        self._events = self._writer(rank)
        self._events.write(
            "start",
            ranks=world,
            rank=rank,
            device=f"cuda:{torch.cuda.current_device()}" if cuda else self._device,
            gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
            threads=torch.get_num_threads(),
            workers=self.workers,
            optimizer=type(optimizer).__name__,
        )

    def _writer(self, rank: int) -> EventWriter:
        return EventWriter(Path(self.request.folder) / "events" / f"rank{rank}.jsonl")

    def _write(self, leave: int) -> None:
        """Write all steps but so many, whose marks the device may not have passed."""
        while self._events is not None and len(self._done) > leave:
            step = self._done.popleft()
            times = step.times(self._clock.seconds, *self._communication(step))
            compiled = {"compiled": True} if step.compiled else {}
            self._events.write("step", t=round(step.t, 6), step=step.number, **times, **compiled)

    def _communication(self, step: RecordedStep) -> tuple[float, float]:
        """Of a step whose buckets were not watched: as that of the last one whose were."""
        if not step.watched and self._of_buckets:
            return self._of_buckets
        found = step.communication(self._clock.seconds)
        self._of_buckets = found if step.with_buckets else None
        return found

    def close(self, status: str = "ended") -> None:
        """The process ends, by itself or because the steps are done."""
        if self._events is None and self._ends.names:
            self._events = self._writer(find_rank_and_world()[0])
        if self._events is None:
            return
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        self._write(0)
        seen = {"optimizers": self._ends.names, "aside": self.aside}
        self._events.write("end", status=status, steps=self._steps, peak_bytes=self._peak_bytes(), **seen)
        self._events.close()
        self._events = None

    def _peak_bytes(self) -> int:
        if self._device == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _end_here(self) -> NoReturn:
        """The steps that were asked for are done. The script is not left to go on, nor to clean up behind itself."""
        rank, world = find_rank_and_world()
        self.close("measured")
        ended = Path(self.request.folder) / "ended"
        ended.mkdir(exist_ok=True)
        (ended / str(rank)).touch()
        wait_for_files([ended / str(peer) for peer in range(world)], PEERS_S)
        exit_process(0)

    def refuse(self, why: str, on_any_ranks: bool = False) -> NoReturn:
        """This cannot be measured; the command that measures says so."""
        with self._writer(find_rank_and_world()[0]) as events:
            events.write("refused", why=why, on_any_ranks=on_any_ranks)
        exit_process(REFUSED)


def describe_rank_mismatch(asked: int, found: int) -> str:
    return (
        f"{asked} rank{'s were' if asked > 1 else ' was'} asked for, and the script joined {found}; write {{ranks}} "
        "where the command says how many there are"
    )


def find_rank_and_world() -> tuple[int, int]:
    """(rank, world), as the process group says or, before there is one, as the launcher did."""
    dist = sys.modules["torch"].distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(UserError):
        if (place := detect_rank(os.environ)) is not None:
            return place.rank, place.world
    return 0, 1


def wait_for_files(files: Sequence[Path], most_s: float) -> None:
    until = time.monotonic() + most_s
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.01)


def exit_process(code: int) -> NoReturn:
    """End this process and its data workers now, whatever its other threads do."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
