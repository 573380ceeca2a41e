"""The four times of a step, taken without making the collectives wait for each other.

    data_s      waiting for input
    comm_s      time in which a collective was in flight: the union of their intervals, not the sum
    exposed_s   the part of comm_s in which this rank could do nothing else
    compute_s   the rest of step_s

A gradient bucket is in flight from its launch until its result arrives; what is in flight after the last launch is
exposed. What an axis sends beside computing is in flight until it is there; waiting for it is exposed. On a CUDA device
the host runs ahead, so moments are events in the device's streams, and are read later.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

TIMES = ("step_s", "data_s", "compute_s", "comm_s", "exposed_s")
Interval = tuple[float, float]
Reading = Callable[[], tuple[float, float]]
"""Return (comm_s, exposed_s) once the device has finished the step."""


def sum_union(intervals: Iterable[Interval]) -> float:
    """Return the time covered by at least one of the intervals."""
    total, end = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def count_compilations() -> int:
    """Return how many functions torch has compiled in this process, or tried to."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # asked at each step: no import
    return int(counters["frames"]["total"]) if counters else 0


def subtract_waiting(step_s: float, data_s: float, exposed_s: float) -> float:
    """Return `compute_s`: the step without waiting for data and for collectives."""
    return max(0.0, step_s - data_s - exposed_s)


def compute_comm_times(
    buckets: list[Interval], blocking: list[Interval], beside: Iterable[Interval] = ()
) -> tuple[float, float]:
    """Return (comm_s, exposed_s) from the intervals of gradient buckets, of blocking collectives, and of those that
    are in flight beside computing."""
    tail = max((end for _, end in buckets), default=0.0) - max((begin for begin, _ in buckets), default=0.0)
    comm = sum_union([*buckets, *blocking, *beside])
    return comm, min(comm, tail + sum_union(blocking))


class CollectiveTimer:
    """Record when the collectives of a step were in flight; results may arrive on other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: list[tuple[Any, Any]] = []
        self._blocking: list[tuple[Any, Any]] = []
        self._beside: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        return perf_counter()

    def bucket_done(self, started: Any) -> None:
        with self._lock:
            self._buckets.append((started, self.now()))

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Time a collective that this rank waits for."""
        started = self.now()
        yield
        self._blocking.append((started, self.now()))

    def watch(self, started: Any, work: Any) -> None:
        """Time a collective in flight, as far as it tells when it ends: gloo's reduce-scatter does not."""

        def done(_: Any) -> None:
            with self._lock:
                self._beside.append((started, self.now()))

        with suppress(RuntimeError):
            work.get_future().then(done)

    def take(self) -> Reading:
        """Return a reading of the collectives since the last call."""
        with self._lock:
            buckets, self._buckets = self._buckets, []
            beside, self._beside = self._beside, []
        blocking, self._blocking = self._blocking, []
        return lambda: compute_comm_times(*map(self.seconds, (buckets, blocking, beside)))

    def seconds(self, marks: list[tuple[Any, Any]]) -> list[Interval]:
        return marks


def build_timer(device: str) -> CollectiveTimer:
    return CudaCollectiveTimer() if device == "cuda" else CollectiveTimer()


class CudaCollectiveTimer(CollectiveTimer):
    """Time collectives by events in CUDA streams."""

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
