"""What heartbeats and monitoring cost a run: steps with them and without, in turns, within the same processes.

    python benchmarks/monitoring.py [--ranks 1,2] [--steps 4000]

Two runs differ by more than this costs, so of every two steps of one run one is without it, by lot: the heartbeats,
the look at losses and slow ranks, and what a rank uses of its machine. What is done now and then is timed by itself.
A step takes a few ms, so that the share is larger than in most runs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline import Workload
from paceline.config import build_spec
from paceline.launch.environment import RankInfo
from paceline.launch.heartbeat import Heartbeat, read_beats
from paceline.runlog import machine
from paceline.runlog.events import read_steps
from paceline.runlog.machine import RankUsage
from paceline.runlog.run_dir import RunDir
from paceline.trainer import anomalies
from paceline.trainer.anomalies import AnomalyDetector
from paceline.trainer.loop import GradientJob

WARM = 200
SWITCHED = "PACELINE_BENCHMARK_MONITORING"


class Line(Workload):
    """A model of 0.8 million parameters."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))

    def data(self, split: str) -> Any:
        x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
        return (x, x[:, :256]) if split == "train" else None

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        x, y = batch
        return ((model(x) - y) ** 2).mean(1).sum(), len(y)


def on(step: int) -> bool:
    """Whether this step, the first being 1, is monitored: one of every two is, the same on all ranks."""
    pair, second = divmod(step - 1, 2)
    return second == random.Random(pair).getrandbits(1)


def switch() -> None:
    """Let each part ask first whether it is its turn."""
    now = {"on": True}
    turn = GradientJob.before_step

    def before_step(job: GradientJob, batch: Any) -> None:
        now["on"] = on(job.state.step + 1)
        turn(job, batch)

    GradientJob.before_step = before_step  # type: ignore[method-assign]
    for kind, name, nothing in ((Heartbeat, "__call__", None), (AnomalyDetector, "step", None), (RankUsage, "now", {})):
        whole = getattr(kind, name)

        def sometimes(*values: Any, whole: Any = whole, nothing: Any = nothing) -> Any:
            return whole(*values) if now["on"] else nothing

        setattr(kind, name, sometimes)


if SWITCHED in os.environ:
    switch()


def measure(ranks: int, steps: int, folder: Path) -> None:
    train = {"steps": steps, "global_batch": 128 * ranks, "lr": 1e-4, "checkpoint_every": 1 << 20}
    values = {"name": f"on{ranks}", "workload": f"{Path(__file__).resolve()}:Line", "train": train}
    spec = build_spec({**values, "parallel": {"ranks": ranks, "threads": 1, "device": "cpu"}})
    run = paceline.train(spec, folder, show=False)
    found = {step["step"]: step["step_s"] for step in read_steps(RunDir(run.path).events_file(0))}
    pairs = [(first, first + 1) if on(first) else (first + 1, first) for first in range(WARM + 1, steps, 2)]
    ratios = [found[monitored] / found[plain] - 1 for monitored, plain in pairs]
    drawn = random.Random(0)
    means = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(1000))
    step_ms = 1e3 * statistics.median(found.values())
    print(
        f"{ranks} ranks, a step of {step_ms:.2f} ms: monitoring costs {statistics.median(ratios):+.2%} "
        f"({means[25]:+.2%} to {means[975]:+.2%}), {len(ratios)} pairs; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def now_and_then(folder: Path) -> None:
    """What is not done in every step: the use of the machine, and the main rank's look at the heartbeats of 64."""
    for rank in range(64):
        Heartbeat(folder, RankInfo(rank, 1, 0, 1, "paceline", "127.0.0.1", 1), 300.0).__exit__(None)
    used, apart_s = RankUsage(), machine.EVERY_S
    machine.EVERY_S = 0.0
    _time("the use of the machine", used.now, apart_s)
    _time("a look at 64 heartbeats", lambda: read_beats(folder), anomalies.LOOK_EVERY_S)
    machine.EVERY_S = apart_s
    with Heartbeat(folder, RankInfo(0, 1, 0, 1, "paceline", "127.0.0.1", 1), 300.0) as beat:
        _time("two heartbeats, of a step of 10 ms", lambda: (beat("data", 1), beat("step", 1)), 0.01)


def _time(name: str, work: Callable[[], object], apart_s: float) -> None:
    took = []
    for _ in range(200):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    took_s = statistics.median(took)
    print(f"{name}: {1e3 * took_s:.3f} ms every {apart_s:g} s, {took_s / apart_s:.4%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=4000)
    asked = parser.parse_args()
    os.environ[SWITCHED] = "1"
    with tempfile.TemporaryDirectory() as folder:
        now_and_then(Path(folder) / "heartbeats")
        for ranks in asked.ranks.split(","):
            measure(int(ranks), asked.steps, Path(folder))


if __name__ == "__main__":
    main()
