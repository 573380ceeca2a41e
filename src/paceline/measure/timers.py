"""The four times of a step, taken without making the collectives wait for each other.

    data_s      waiting for input
    comm_s      time in which a collective was in flight: the union of their intervals, not the sum
    exposed_s   the part of comm_s in which this rank could do nothing else
    compute_s   the rest of step_s

A gradient bucket is in flight from the moment it is handed over until its result is there. Once the last bucket is
handed over the backward pass has nothing left to compute, so what remains in flight from then on is exposed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import perf_counter


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The time covered by at least one of the intervals."""
    total, end = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


class Flights:
    """The collectives of the present step, reported by whoever starts them; results may land on other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: list[tuple[float, float]] = []
        self._last_start = 0.0
        self._blocked = 0.0

    def start(self) -> float:
        self._last_start = perf_counter()
        return self._last_start

    def land(self, started: float) -> None:
        with self._lock:
            self._intervals.append((started, perf_counter()))

    def block(self, started: float) -> None:
        """A collective that the caller waited for from beginning to end."""
        self.land(started)
        self._blocked += perf_counter() - started

    def backward_done(self) -> None:
        """The gradients are complete: whatever was in flight after the last hand-over was waited for."""
        if self._last_start:
            self._blocked += perf_counter() - self._last_start

    def take(self) -> tuple[float, float]:
        """(comm_s, exposed_s) since the last call."""
        with self._lock:
            comm, exposed = union(self._intervals), self._blocked
            self._intervals.clear()
        self._last_start = self._blocked = 0.0
        return comm, min(exposed, comm)
