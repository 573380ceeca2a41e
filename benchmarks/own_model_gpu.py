"""A user's own model on one CUDA device: Paceline against the eager loop that one would write by hand.

    python benchmarks/own_model_gpu.py           # ms per step of both, their ratio, and the last loss of both

Both train the same weights on the same batches: 60,000 random images of 3 × 32 × 32 bytes, batch 256, bf16, AdamW,
gradients clipped, constant learning rate. `cnn` is a residual network with group norms and 2.8 million parameters,
`mlp` has 1.8 million. The CNN is compiled, as it would be by itself in a run of a few thousand steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from gpu import device_name
from paceline import Workload
from paceline.config import RunSpec, build_spec
from paceline.data.order import Order
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

SAMPLES, BATCH = 60_000, 256
WAYS = {"cnn": ("on",), "mlp": ("auto",)}
"""Values of train.compile that are compared with the hand-written loop."""


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(8, outside)
        self.second, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(8, outside)
        same = inside == outside and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))) + self.short(x))


class Mlp(Workload):
    def model(self) -> nn.Module:
        hidden = [nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return (images, torch.randint(0, 10, (SAMPLES,), generator=generator)) if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images.float() / 255), labels, reduction="sum"), len(labels)


class Cnn(Mlp):
    def model(self) -> nn.Module:
        sizes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU())
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
        return nn.Sequential(*stem, *(Residual(*size) for size in sizes), *head)


def spec_of(model: str, steps: int, more: dict[str, Any]) -> RunSpec:
    return build_spec(
        {
            "name": f"own-{model}",
            "workload": f"{Path(__file__).resolve()}:{model.capitalize()}",
            "train": {"steps": steps, "global_batch": BATCH, "precision": "bf16", "schedule": "constant", "warmup": 0},
            "parallel": {"device": "cuda"},
        }
    ).replace(more)


def by_hand(spec: RunSpec) -> tuple[float, float]:
    """(seconds per step, last loss) of a plain loop: batches from host memory, one operation after the other."""
    train, workload = spec.train, build_workload(spec)
    images, labels = workload.data("train")
    torch.manual_seed(train.seed)
    model = workload.model().cuda()
    groups = [[p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]]
    decays = [{"params": p, "weight_decay": w} for p, w in zip(groups, (train.weight_decay, 0.0), strict=True) if p]
    optimizer = torch.optim.AdamW(decays, lr=train.lr, fused=True)
    order, marks, loss = Order(SAMPLES, BATCH, train.seed), [], torch.zeros(())
    assert train.steps
    for batch in order.global_batches(0, train.steps):
        ids = torch.from_numpy(batch.ids)
        x, y = images[ids].cuda(non_blocking=True), labels[ids].cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x.float() / 255), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if batch.step % 10 == 9:
            loss.item()  # shown now and then, as Paceline does
            marks.append(time.perf_counter())
    each = [(b - a) / 10 for a, b in pairwise(marks)]
    return statistics.median(each[len(each) // 2 :]), float(loss.detach())


def by_paceline(spec: RunSpec) -> tuple[float, float, str]:
    """(seconds per step, last loss, how a step ran)"""
    with tempfile.TemporaryDirectory() as out:
        run = RunDir(paceline.train(spec, out, show=False).path)
        steps = read_steps(run.events_file(0))
        said = next(iter(read_events(run.events_file(0), "start")))["execution"]
    return statistics.median(step["step_s"] for step in steps[len(steps) // 2 :]), steps[-1]["loss"], said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", choices=WAYS)
    arguments = parser.parse_args()
    print(f"{device_name()}, torch {torch.__version__}, {arguments.steps} steps")
    by_paceline(spec_of("mlp", 20, {}))  # what a first run imports beside its steps is not what is measured here
    for model in [arguments.only] if arguments.only else WAYS:
        hand_s, hand_loss = by_hand(spec_of(model, arguments.steps, {}))
        print(f"{model}: by hand {hand_s * 1e3:.3f} ms a step, loss {hand_loss:.4f}", flush=True)
        for compile_ in (*WAYS[model], "off"):
            own_s, own_loss, said = by_paceline(spec_of(model, arguments.steps, {"train.compile": compile_}))
            ratio = f"{hand_s / own_s:.2f} times as fast, loss {own_loss:.4f}"
            print(f"{model}: train.compile={compile_}: {own_s * 1e3:.3f} ms a step, {ratio}; {said}", flush=True)


if __name__ == "__main__":
    main()
