"""Record the steps of a script as the events that our own runs write.

A step lasts from the end of one `optimizer.step()` to the end of the next; the first only starts the clock. Times are
marks of one clock: the host's, or on a CUDA device events in its streams, which are read much later. A note is a plain
list, and sums are taken when steps are written: Python between two layers of a model runs with cold caches, several
times slower than in one go.
"""

import multiprocessing
import os
import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import UserError
from paceline.io.format import plural
from paceline.launch.environment import detect_rank
from paceline.measurement.scripts.command import RecordRequest
from paceline.runlog.events import EventWriter
from paceline.runlog.timers import Interval, build_timer, count_compilations, subtract_waiting, sum_union

FLIGHT = "flight"  # a collective, from call to result
WAIT = "wait"  # for a collective
BLOCKING = "blocking"  # a synchronous collective
BUCKET = "bucket"  # gradients in flight; their pass
INPUT = "input"  # waiting for a batch; its samples, or None in an evaluation
Note = list[Any]  # kind, start, end (None: in flight), detail
Seconds = Callable[[list[tuple[Any, Any]]], list[Interval]]


@dataclass(slots=True)
class RecordedStep:
    number: int
    t: float  # Unix time of its end
    begin: Any
    end: Any
    compiled: bool
    watched: bool
    notes: list[Note]

    def times(self, seconds: Seconds, comm_s: float, exposed_s: float) -> dict[str, Any]:
        ((begin_s, end_s),) = seconds([(self.begin, self.end)])
        step_s = end_s - begin_s
        data_s = sum_union(self._select(seconds, INPUT))
        loaded = [samples for kind, *_, samples in self.notes if kind == INPUT]
        comm_s, exposed_s = min(comm_s, step_s), min(exposed_s, step_s)
        return {
            "step_s": step_s,
            "data_s": data_s,
            "compute_s": subtract_waiting(step_s, data_s, exposed_s),
            "comm_s": comm_s,
            "exposed_s": exposed_s,
            "rank_batch": sum(filter(None, loaded)),
            **({"evaluated": True} if None in loaded else {}),
        }

    def communication(self, seconds: Seconds) -> tuple[float, float]:
        comm_s = sum_union(self._select(seconds, FLIGHT, BLOCKING, BUCKET))
        return comm_s, min(comm_s, sum_union([*self._select(seconds, WAIT, BLOCKING), *self._tails(seconds)]))

    def _select(self, seconds: Seconds, *kinds: str) -> list[Interval]:
        notes = [(begin, self._end_of(end)) for kind, begin, end, _ in self.notes if kind in kinds]
        return seconds([(begin, end) for begin, end in notes if type(begin) is type(end)])

    def _tails(self, seconds: Seconds) -> list[Interval]:
        """Return the exposed intervals: after the last bucket of a backward pass nothing is left to compute."""
        passes: defaultdict[Any, list[tuple[Any, Any]]] = defaultdict(list)
        for kind, begin, end, backward in self.notes:
            if kind == BUCKET and type(begin) is type(end := self._end_of(end)):
                passes[backward].append((begin, end))
        flights = [seconds(of_pass) for of_pass in passes.values()]
        return [(max(begin for begin, _ in buckets), max(end for _, end in buckets)) for buckets in flights]

    def _end_of(self, mark: Any) -> Any:
        """Return the end of a note: that of the step, if the thread that waits for the result has not run yet."""
        return self.end if mark is None else mark


class StepTracker:
    """Tell which calls of `optimizer.step` end a step: those of the first optimiser, without optimisers inside of it.

    Another one that steps twice in a row takes its place: the first is no longer in use.
    """

    def __init__(self) -> None:
        self._inside: list[Any] = []
        self._ending: int | None = None
        self._other: int | None = None

    def start(self, optimizer: Any) -> None:
        self._leave(optimizer)  # a step that raised an exception has no end
        self._inside.append(optimizer)

    def finish(self, optimizer: Any) -> bool:
        self._leave(optimizer)
        if self._inside:
            return False
        if self._ending is None or self._other == id(optimizer):
            self._ending = id(optimizer)
        ends = self._ending == id(optimizer)
        self._other = None if ends else id(optimizer)
        return ends

    def _leave(self, optimizer: Any) -> None:
        if optimizer in self._inside:
            del self._inside[self._inside.index(optimizer) :]


READ_LATER = 50  # until marks on a device are read
TOGETHER = 50  # written at once: caches are cold
WATCHED = 4
"""One step in so many has its gradient buckets recorded, which makes a step of 20 ms longer by 2 to 4 %."""
PEERS_S = 10.0  # for peers, which may still need it
REFUSED_EXIT_CODE = 3


class StepRecorder:
    def __init__(self, request: RecordRequest) -> None:
        self.request = request
        self.workers: int | None = None
        self.aside = False  # collectives in their own stream
        self.ddp = False
        self.watching = True
        self.watchers: list[Callable[[bool], None]] = []
        self.noted: list[Note] = []
        self._clock = build_timer("cpu")
        self.mark = self._clock.now
        self._tracker = StepTracker()
        self._begin: Any = None
        self._compilations = 0
        self._done: deque[RecordedStep] = deque()
        self._of_buckets: tuple[float, float] | None = None
        self._steps = 0
        self._events: EventWriter | None = None
        self._device = "cpu"

    def note(self, kind: str, begin: Any, detail: Any = None) -> None:
        self.noted.append([kind, begin, self.mark(), detail])

    def note_until_done(self, kind: str, begin: Any, future: Any, detail: Any = None) -> None:
        """Record an operation in flight, in this step; mark its end when another thread hears of its result."""
        note: Note = [kind, begin, None, detail]
        self.noted.append(note)
        future.add_done_callback(lambda future: note.__setitem__(2, self.mark()))

    def optimizer_begins(self, optimizer: Any, *call: Any) -> None:
        self._tracker.start(optimizer)

    def optimizer_ended(self, optimizer: Any, *call: Any) -> None:
        if not self._tracker.finish(optimizer):
            return
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
        watching = self._steps < WATCHED or self._steps % WATCHED == 0
        if watching != self.watching:
            self.watching = watching
            for notify in self.watchers:
                notify(watching)
        leave = READ_LATER if self._device == "cuda" else 0
        if len(self._done) >= leave + TOGETHER:
            self._write(leave)
        if self._steps >= self.request.steps:
            self._exit_early()

    def _start(self, optimizer: Any) -> None:
        import torch

        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = find_rank_and_world()
        if self.request.ranks > 1 and not joined:
            self.refuse(
                "each rank trained alone, in no process group of torch.distributed; wrap the model in "
                "DistributedDataParallel, or use paceline.run (docs/moving/pytorch.md)"
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
        while self._events is not None and len(self._done) > leave:
            step = self._done.popleft()
            times = step.times(self._clock.seconds, *self._communication(step))
            compiled = {"compiled": True} if step.compiled else {}
            self._events.write("step", t=round(step.t, 6), step=step.number, **times, **compiled)

    def _communication(self, step: RecordedStep) -> tuple[float, float]:
        if not step.watched and self._of_buckets:
            return self._of_buckets
        found = step.communication(self._clock.seconds)
        self._of_buckets = found if any(note[0] == BUCKET for note in step.notes) else None
        return found

    def close(self, status: str = "ended") -> None:
        if self._events is None:
            return
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
            peak_bytes = int(torch.cuda.max_memory_allocated())
        self._write(0)
        seen = {"aside": self.aside, "ddp": self.ddp}
        self._events.write("end", status=status, steps=self._steps, peak_bytes=peak_bytes, **seen)
        self._events.close()
        self._events = None

    def _exit_early(self) -> NoReturn:
        rank, world = find_rank_and_world()
        self.close("measured")
        ended = Path(self.request.folder) / "ended"
        ended.mkdir(exist_ok=True)
        (ended / str(rank)).touch()
        files = [ended / str(peer) for peer in range(world)]
        until = time.monotonic() + PEERS_S
        while time.monotonic() < until and not all(file.exists() for file in files):
            time.sleep(0.01)
        exit_process(0)

    def refuse(self, reason: str) -> NoReturn:
        """Record why the script cannot be measured, and end this process."""
        with self._writer(find_rank_and_world()[0]) as events:
            events.write("refused", why=reason)
        exit_process(REFUSED_EXIT_CODE)


def describe_rank_mismatch(asked: int, found: int) -> str:
    joined = f"the script joined {plural(found, 'rank')} in place of {asked}"
    return f"{joined}; write {{ranks}} where the command says how many there are"


def find_rank_and_world() -> tuple[int, int]:
    dist = sys.modules["torch"].distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(UserError):
        if (place := detect_rank(os.environ)) is not None:
            return place.rank, place.world
    return 0, 1


def exit_process(code: int) -> NoReturn:
    """End this process and its data workers at once, whatever other threads do."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
