"""A line that takes its time: a tiny model whose steps last as long as the test needs to interrupt them."""

import time
from pathlib import Path

import torch

from paceline import Workload
from paceline.config import Section, field


class Pace(Section):
    step_s: float = field(0.0, "s", "that each pass takes at least", ge=0)
    until: str = field("", "path", "a file: once it is there, passes take no time")
    hold_at: int = field(0, "batches", "the one that waits for that file; 0 none", ge=0)
    fail_at: int = field(0, "batches", "the one that fails, of each attempt; 0 none", ge=0)


class SlowLine(Workload):
    Data = Pace

    def model(self):
        return torch.nn.Linear(8, 1)

    def data(self, split):
        drawn = torch.Generator().manual_seed(3)
        x = torch.randn(97, 8, generator=drawn)
        return (x, x @ torch.arange(8.0)[:, None] + 1) if split == "train" else None

    def loss(self, model, batch):
        x, y = batch
        self.passes = getattr(self, "passes", 0) + 1
        self._wait()
        if self.passes == self.spec.data.fail_at:
            raise RuntimeError("this batch fails, as the test wants")
        return ((model(x) - y) ** 2).sum(), len(y)

    def _wait(self):
        pace = self.spec.data
        end = time.monotonic() + (float("inf") if self.passes == pace.hold_at else pace.step_s)
        while time.monotonic() < end and not (pace.until and Path(pace.until).exists()):
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
