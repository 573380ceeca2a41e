"""What worker processes bring for a data set with 5 ms of Python per sample.

    python benchmarks/workers.py [--workers 0 1 2] [--steps 40] [--repeats 3]

A small model is trained on one rank with each number of workers, in turns. A sample is a fixed amount of work, found at
the start: a busy machine makes it longer and takes cores from the workers, so measure when it is idle. The losses must
be the same to the last digit; exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from paceline import Workload, train
from paceline.config import Section, build_spec, field
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import drop_warmup_steps

SAMPLE_S = 0.005


def python_work(rounds: int) -> int:
    x = 1
    for _ in range(rounds):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


class Work(Section):
    rounds: int = field(50_000, "rounds", "of a loop in Python, for each sample")


class Slow(Dataset):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        python_work(self.rounds)
        return torch.full((16,), index / 4096) + 0.1 * random.random(), index % 2


class SlowData(Workload):
    Data = Work

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def data(self, split: str) -> Slow | None:
        return Slow(self.spec.data.rounds) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def rounds_of(seconds: float) -> int:
    """That take so long, where nothing disturbs."""
    trials = []
    for _ in range(20):
        began = time.perf_counter()
        python_work(20_000)
        trials.append(time.perf_counter() - began)
    return round(20_000 * seconds / min(trials))


def step_s(workers: int, rounds: int, steps: int, out: Path) -> tuple[float, list[float]]:
    """(seconds of a step in the mean, the losses)."""
    spec = build_spec(
        {
            "workload": f"{__file__}:SlowData",
            "data": {"workers": workers, "rounds": rounds},
            "train": {"steps": steps, "global_batch": 16},
            "parallel": {"threads": 1, "device": "cpu"},
        }
    )
    events = read_steps(RunDir(train(spec, out, show=False).path).events_file(0))
    return statistics.fmean(e["step_s"] for e in drop_warmup_steps(events)), [e["loss"] for e in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    rounds = rounds_of(SAMPLE_S)
    found: dict[int, list[float]] = {workers: [] for workers in asked.workers}
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.repeats):
            for workers in asked.workers:
                seconds, loss = step_s(workers, rounds, asked.steps, Path(folder))
                found[workers].append(seconds)
                losses.append(loss)
    base = found[asked.workers[0]]
    same = losses.count(losses[0]) == len(losses)
    print(f"{rounds:,} rounds of Python for each of 16 samples of a step; the same losses: {same}")
    for workers, times in found.items():
        ratios = [a / b for a, b in zip(base, times, strict=True)]
        print(
            f"{workers} workers: {1e3 * statistics.median(times):6.1f} ms per step, "
            f"{statistics.median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    sys.exit(not same)


if __name__ == "__main__":
    main()
