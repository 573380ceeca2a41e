"""What hooks notice in one process of a measured command, step by step, as the events that our own runs write.

A step ends when the optimiser has stepped, and the next begins; the first only starts the clock. All moments are marks
of one clock: the host's, or on a CUDA device events in its streams, which are read when the device has long passed
them. Between two marks around the wait for a batch lies the time in which the device had nothing to do.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import UserError
from paceline.launch.environment import detect
from paceline.measuring.outside.noted_step import Note, NotedStep
from paceline.measuring.outside.optimizers import SeveralOptimizers, StepEnds
from paceline.measuring.outside.request import Request
from paceline.record.events import EventWriter
from paceline.record.timers import compilations, timer_of

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


class StepNotes:
    def __init__(self, request: Request) -> None:
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
        self._clock = timer_of("cpu")
        self.mark = self._clock.now
        self._ends = StepEnds(request.steps_by)
        self._begin: Any = None
        self._compilations = 0
        self._done: deque[NotedStep] = deque()
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
        before, self._compilations = self._compilations, compilations()
        if begin is None:
            return
        self._steps += 1
        compiled = self._compilations > before
        self._done.append(NotedStep(self._steps, time.time(), begin, end, compiled, self.watching, notes))
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
        rank, world = place_of_this_process()
        if self.request.ranks > 1 and not joined:
            self.refuse(
                "the ranks had not joined a process group of torch.distributed at their first step: each of them "
                "trains by itself, or they exchange gradients in a way that cannot be seen"
            )
        if world != self.request.ranks:
            self.refuse(other_ranks(self.request.ranks, world))
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._device = next((p.device.type for p in parameters), "cpu")
        self._clock = timer_of(self._device)
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

    def _communication(self, step: NotedStep) -> tuple[float, float]:
        """Of a step whose buckets were not watched: as that of the last one whose were."""
        if not step.watched and self._of_buckets:
            return self._of_buckets
        found = step.communication(self._clock.seconds)
        self._of_buckets = found if step.with_buckets else None
        return found

    def close(self, status: str = "ended") -> None:
        """The process ends, by itself or because the steps are done."""
        if self._events is None and self._ends.names:
            self._events = self._writer(place_of_this_process()[0])
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
        rank, world = place_of_this_process()
        self.close("measured")
        ended = Path(self.request.folder) / "ended"
        ended.mkdir(exist_ok=True)
        (ended / str(rank)).touch()
        wait_for([ended / str(peer) for peer in range(world)], PEERS_S)
        leave(0)

    def refuse(self, why: str, on_any_ranks: bool = False) -> NoReturn:
        """This cannot be measured; the command that measures says so."""
        with self._writer(place_of_this_process()[0]) as events:
            events.write("refused", why=why, on_any_ranks=on_any_ranks)
        leave(REFUSED)


def other_ranks(asked: int, found: int) -> str:
    return (
        f"{asked} rank{'s were' if asked > 1 else ' was'} asked for, and the script joined {found}; write {{ranks}} "
        "where the command says how many there are"
    )


def place_of_this_process() -> tuple[int, int]:
    """(rank, world), as the process group says or, before there is one, as the launcher did."""
    dist = sys.modules["torch"].distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(UserError):
        if (place := detect(os.environ)) is not None:
            return place.rank, place.world
    return 0, 1


def wait_for(files: Sequence[Path], most_s: float) -> None:
    until = time.monotonic() + most_s
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.01)


def leave(code: int) -> NoReturn:
    """End this process and its data workers now, whatever its other threads do."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
