"""A share of the cores for each rank of a host that wait for each other many times a second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.launch.environment import Place


@contextmanager
def own_cores(place: Place, threads: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, on this rank's share of the cores, where the ranks take all of them.

    A rank that has slept for its peers is else often woken on the core of one that runs, and both wait. Where cores are
    left over, or srun or mpirun has bound the ranks, nothing is changed.
    """
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if place.local_world == 1 or len(before) != threads * place.local_world:
        yield
        return
    first = threads * place.local_rank
    os.sched_setaffinity(0, sorted(before)[first : first + threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
