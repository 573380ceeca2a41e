"""A training script as people have it, with a clock of its own: what `outside.py` measures.

    torchrun --nproc-per-node 2 benchmarks/outside_script.py ddp|accelerate|lightning [--steps 40] [--profile]

Prints a line of JSON when it ends: seconds of each step by its own clock, those of the processor and, with --profile,
the communication of each step that torch's profiler saw exposed. With --turns it goes on for so many turns of 5 steps,
and all hooks are taken out for every other one: two trainings differ by more than hooks cost, by where memory lies.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, dataloader

from paceline.measurement.scripts.buckets import swap_groups

WIDTH = 512
BATCH = 64
POOL = 8192
"""Different samples."""
TURN = 5
"""Steps: few, so that what else goes on around the machine is the same for two turns in a row."""
Interval = tuple[float, float]


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


class Samples(TensorDataset):
    """Enough for so many steps: the same come again."""

    def __init__(self, steps: int) -> None:
        super().__init__(torch.randn(POOL, WIDTH), torch.randint(0, 10, (POOL,)))
        self.count = BATCH * int(os.environ.get("WORLD_SIZE", 1)) * steps

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % POOL)


class Clock:
    """When each step was over, and the time of the processor by then; hooks go and come after the first `steps`."""

    def __init__(self, steps: int, turns: int) -> None:
        self.steps = steps
        self.total = steps + turns * TURN
        self.over: list[tuple[float, float]] = []
        self.hooks = Hooks()

    def step_is_over(self) -> None:
        self.over.append((perf_counter(), process_time()))
        turn, step = divmod(len(self.over) - self.steps, TURN)
        if turn >= 0 and step == 0:
            self.hooks.turn(measured(turn))

    def turns(self) -> list[tuple[bool, list[float], list[float]]]:
        """(measured, seconds of its steps by the clock, those of the processor)"""
        starts = range(self.steps, self.total, TURN)
        return [(measured(turn), *self.seconds(start)) for turn, start in enumerate(starts)]

    def seconds(self, start: int = 0, count: int = TURN) -> tuple[list[float], list[float]]:
        """Of each step from one to another, by the clock and by the processor; the first belongs to what was before."""
        passed = zip(*self.over[start : start + count], strict=True)
        by_clock, of_processor = ([after - before for before, after in pairwise(times)] for times in passed)
        return by_clock, of_processor


def measured(turn: int) -> bool:
    return turn % 4 in (0, 3)


def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Some work without parameters, so that computing takes a while beside a small gradient."""
    x, y = batch
    for _ in range(4):
        x = torch.tanh(x @ (x.T @ x) / WIDTH)
    return F.cross_entropy(net(x), y)


def ddp(clock: Clock) -> None:
    dist.init_process_group("gloo")
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters())
    data = Samples(clock.total)
    for batch in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
        clock.step_is_over()


def accelerate(clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    loader = DataLoader(Samples(clock.total), BATCH, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss(net, batch))
        optimizer.step()
        clock.step_is_over()


def lightning(clock: Clock) -> None:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *rest: Any) -> None:
            clock.step_is_over()

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Net(), DataLoader(Samples(clock.total), BATCH, shuffle=True))


class Hooks:
    """Those of the measurement, if this process is measured: what took a place knows what it replaced."""

    def __init__(self) -> None:
        homes = (dataloader._BaseDataLoaderIter, dist.Work, DistributedDataParallel, dist, dist.distributed_c10d)
        self.replaced = [
            (home, name, found)
            for home in homes
            for name, found in list(vars(home).items())
            if hasattr(found, "__code__") and Path(found.__code__.co_filename).match("measuring/outside/*.py")
        ]
        self.at_steps = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self.set = [dict(hooks) for hooks in self.at_steps]
        self.notes = [hook.__self__ for hook in self.set[0].values()]

    def turn(self, on: bool) -> None:
        for home, name, ours in self.replaced:
            setattr(home, name, ours if on else ours.__wrapped__)
        for hooks, ours in zip(self.at_steps, self.set, strict=True):
            hooks.clear()
            hooks.update(ours if on else {})
        swap_groups(on and all(notes.watching for notes in self.notes))


def exposed_by_profiler(profiler: Any) -> list[float]:
    """Seconds of each step with a collective in flight while no operation of torch ran; steps end as optimisers do."""
    found = [(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in profiler.events()]
    flights = merged([(begin, end) for name, begin, end in found if name.startswith("gloo:")])
    busy = merged([(begin, end) for name, begin, end in found if name.startswith("aten::")])
    ends = sorted(end for name, _, end in found if name.startswith("Optimizer.step"))
    return [overlap(flights, [step]) - overlap(busy, flights, step) for step in pairwise(ends)]


def merged(intervals: list[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def overlap(ones: list[Interval], others: list[Interval], within: Interval = (0.0, float("inf"))) -> float:
    """Seconds that both have in common."""
    low, high = within
    return sum(max(0.0, min(one[1], other[1], high) - max(one[0], other[0], low)) for one in ones for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("ddp", "accelerate", "lightning"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--turns", type=int, default=0)
    asked = parser.parse_args()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    clock = Clock(asked.steps, asked.turns)
    with profile if asked.profile else nullcontext():
        {"ddp": ddp, "accelerate": accelerate, "lightning": lightning}[asked.kind](clock)
    by_clock, of_processor = clock.seconds(0, asked.steps)
    exposed = exposed_by_profiler(profile) if asked.profile else []
    found = {"step_s": by_clock, "processor_s": of_processor, "exposed_s": exposed, "turns": clock.turns()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
