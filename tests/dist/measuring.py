"""What ranks do in the tests of measuring."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from paceline import train
from paceline.config import RunSpec
from paceline.measurement.links import Link, time_collectives
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.timers import sum_union


def comm_twice(spec: RunSpec, out: Path) -> tuple[float, float]:
    """(time with a collective of training in flight by our own events, the same by torch's profiler)."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = train(spec, out, show=False)
    flights = [e.time_range for e in profiler.events() if e.name == "gloo:all_reduce"]
    steps = read_steps(RunDir(result.path).events_file(int(os.environ["RANK"])))
    theirs = sum_union([(flight.start / 1e6, flight.end / 1e6) for flight in flights])
    return sum(step["comm_s"] for step in steps), theirs


def links_between_hosts(sizes_bytes: tuple[int, ...]) -> list[Link]:
    """As on one host for each rank."""
    with mock.patch("socket.gethostname", return_value=f"host{os.environ['RANK']}"):
        return time_collectives(sizes_bytes, 1)
