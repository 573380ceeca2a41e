"""The four times of a step, taken without making the collectives wait for each other.

    data_s      waiting for input
    comm_s      time in which a collective was in flight: the union of their intervals, not the sum
    exposed_s   the part of comm_s in which this rank could do nothing else
    compute_s   the rest of step_s

A gradient bucket is in flight from the moment it is handed over until its result is there. Once the last bucket is
handed over the backward pass has nothing left to compute, so what remains in flight from then on is exposed.

On a CPU the clock is the host's. On a CUDA device the host runs ahead, so the moments are marks in the device's own
streams, and are read when the loop reads its numbers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

TIMES = ("step_s", "data_s", "compute_s", "comm_s", "exposed_s")
"""Their names in the record of a step."""
Interval = tuple[float, float]
Reading = Callable[[], tuple[float, float]]
"""Gives (comm_s, exposed_s), once the device has done the step."""


def sum_union(intervals: Iterable[Interval]) -> float:
    """The time covered by at least one of the intervals."""
    total, end = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def count_compilations() -> int:
    """Functions that torch compiled in this process so far, or tried to."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # asked at each step: no import
    return int(counters["frames"]["total"]) if counters else 0


def subtract_waiting(step_s: float, data_s: float, exposed_s: float) -> float:
    """What is left of a step when waiting for data and for collectives is taken away."""
    return max(0.0, step_s - data_s - exposed_s)


def compute_comm_times(buckets: list[Interval], blocking: list[Interval]) -> tuple[float, float]:
    """From the intervals of the gradient buckets and of the collectives that were waited for from their start."""
    tail = max((end for _, end in buckets), default=0.0) - max((begin for begin, _ in buckets), default=0.0)
    comm = sum_union([*buckets, *blocking])
    return comm, min(comm, tail + sum_union(blocking))


class CollectiveTimer:
    """When the collectives of the present step were in flight; results may come on other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: list[tuple[Any, Any]] = []
        self._blocking: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        """A mark of the present moment."""
        return perf_counter()

    def bucket_done(self, started: Any) -> None:
        """A bucket's result is there."""
        with self._lock:
            self._buckets.append((started, self.now()))

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a collective beside which this rank does nothing."""
        started = self.now()
        yield
        self._blocking.append((started, self.now()))

    def take(self) -> Reading:
        """Those since the last call."""
        with self._lock:
            buckets, self._buckets = self._buckets, []
        blocking, self._blocking = self._blocking, []
        return lambda: compute_comm_times(self.seconds(buckets), self.seconds(blocking))

    def seconds(self, marks: list[tuple[Any, Any]]) -> list[Interval]:
        return marks


def build_timer(device: str) -> CollectiveTimer:
    return CudaCollectiveTimer() if device == "cuda" else CollectiveTimer()


class CudaCollectiveTimer(CollectiveTimer):
    """The same by events in the streams of a CUDA device."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._device = torch.cuda.current_device()
        self._origin = self.now()

    def now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # on a thread of gloo the present device is the first
        return event

    def seconds(self, marks: list[tuple[Any, Any]]) -> list[Interval]:
        origin = self._origin
        return [(origin.elapsed_time(begin) / 1e3, origin.elapsed_time(end) / 1e3) for begin, end in marks]
