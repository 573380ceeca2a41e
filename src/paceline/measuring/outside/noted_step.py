"""What was noted during a step of a script, and the four times that follow from it.

A note is a plain tuple, and all sums wait until steps are written: a line of Python that runs between two layers of a
model finds the caches of the processor full of it, and takes several times as long as among others of its kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.record.timers import Interval, compute_s, union

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
class NotedStep:
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
        data_s = union(self._of(seconds, INPUT))
        comm_s, exposed_s = min(comm_s, step_s), min(exposed_s, step_s)
        return {
            "step_s": step_s,
            "data_s": data_s,
            "compute_s": compute_s(step_s, data_s, exposed_s),
            "comm_s": comm_s,
            "exposed_s": exposed_s,
            "rank_batch": sum(note[3] for note in self.notes if note[0] == INPUT),
        }

    def communication(self, seconds: Seconds) -> tuple[float, float]:
        """(comm_s, exposed_s)"""
        comm_s = union(self._of(seconds, FLIGHT, BLOCKING, BUCKET))
        return comm_s, min(comm_s, union([*self._of(seconds, WAIT, BLOCKING), *self._tails(seconds)]))

    @property
    def with_buckets(self) -> bool:
        return any(note[0] == BUCKET for note in self.notes)

    def _of(self, seconds: Seconds, *kinds: str) -> list[Interval]:
        """Without those that began by another clock, that of the host, before the device was known."""
        return seconds([(begin, end) for kind, begin, end, _ in self.notes if kind in kinds and _alike(begin, end)])

    def _tails(self, seconds: Seconds) -> list[Interval]:
        """After the last bucket of a backward pass there is nothing left to compute: what is in flight from then on is
        waited for."""
        passes: defaultdict[Any, list[tuple[Any, Any]]] = defaultdict(list)
        for kind, begin, end, backward in self.notes:
            if kind == BUCKET and _alike(begin, end):
                passes[backward].append((begin, end))
        flights = [seconds(of_pass) for of_pass in passes.values()]
        return [(max(begin for begin, _ in buckets), max(end for _, end in buckets)) for buckets in flights]


def _alike(begin: Any, end: Any) -> bool:
    return type(begin) is type(end)
