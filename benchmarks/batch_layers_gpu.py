"""Batch norm over groups on one CUDA device: what it costs, and the accuracy it reaches, beside torch's own.

    python benchmarks/batch_layers_gpu.py [--data MNIST_FOLDER] [--seeds 3] [--epochs 3] [--limit SECONDS]

First one layer of each shape, forward and backward; then a ResNet-18 on MNIST (made images without `--data`) and a
ResNet-50 on random images, with groups of 32 and with statistics over all 256 samples of the pass, in turns. No run
begins after the limit.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import guest_modules
import numpy as np
import torch
from batch_layers import Residual
from torch import Tensor, nn

import paceline
from paceline.config import Section, build_spec, field
from paceline.nn.batch_norm import GroupedBatchNorm, group_batch_norms
from paceline.nn.keyed_dropout import PASS
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir

BATCH, GROUP = 256, 32
SHAPES = ((64, 28), (128, 14), (256, 7), (512, 4), (64, 80), (256, 40), (2048, 5))
"""Channels and side of an image."""
BEGAN = time.perf_counter()


class Digits(Residual):
    score = "accuracy"

    class Data(Section):
        path: str = field("", "", "folder with the four files of MNIST; made images without one")

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        if not self.spec.data.path:
            return super().data(split)
        name, start = ("train" if split == "train" else "t10k"), {"images": 16, "labels": 8}
        files = [Path(self.spec.data.path) / f"{name}-{kind}.idx{3 - 2 * i}-ubyte.gz" for i, kind in enumerate(start)]
        images, labels = (
            np.frombuffer(gzip.decompress(file.read_bytes())[skip:], np.uint8)
            for file, skip in zip(files, start.values(), strict=True)
        )
        scaled = (images.reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.13) / 0.31
        return torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        hits = model(batch[0]).argmax(1) == batch[1]
        return {"accuracy": hits.sum(), "count": len(hits)}


def make_ways() -> dict[str, tuple[Any, Any]]:
    """Return for each way its `train.batchnorm_group` and whether groups are normalised in one launch."""
    return {"torch's own": ("as_is", True), "groups": (GROUP, True), "groups one by one": (GROUP, False)}


def time_layer(channels: int, side: int, group: int | None, at_once: bool, form: torch.memory_format) -> float:
    """Return the microseconds of forward and backward, from the replays of a CUDA graph."""
    norm = nn.Sequential(nn.BatchNorm2d(channels)).cuda()
    if group:
        group_batch_norms(norm, group)
    x = torch.randn(BATCH, channels, side, side, device="cuda", dtype=torch.bfloat16).to(memory_format=form)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def run() -> None:
        for norm_only in norm:
            norm_only.found = ()
        norm(x).backward(dy)
        x.grad = norm[0].weight.grad = norm[0].bias.grad = None

    PASS.samples, PASS.counted = BATCH, True
    with way_of_groups(at_once):
        return replay(run)


def replay(run: Callable[[], None]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            run()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return statistics.median(times)


def compare_outputs() -> None:
    """Print the largest differences of outputs, gradients and statistics to those in fp64: at once, and one by one."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = (torch.randn(70, 96, 9, 9, device="cuda") * 2 + 5).to(dtype)
        dy = torch.randn_like(x)
        exact = normalise(x.double(), dy.double(), False)
        for name, at_once in (("at once", True), ("one by one", False)):
            found = zip(normalise(x, dy, at_once), exact, strict=True)
            differences = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in found]
            print(f"{dtype}, {name}, to fp64: " + " ".join(f"{one:.1e}" for one in differences), flush=True)


def normalise(x: Tensor, dy: Tensor, at_once: bool) -> list[Tensor]:
    norm = nn.BatchNorm2d(x.shape[1], device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    group_batch_norms(nn.Sequential(norm), GROUP)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    PASS.samples, PASS.counted = len(x), True
    with way_of_groups(at_once):
        y = norm(x)
        y.backward(dy.to(memory_format=torch.channels_last))
    kept = torch.stack([statistics_of_group for statistics_of_group, _ in norm.found])
    return [one.detach() for one in (y, x.grad, norm.weight.grad, norm.bias.grad, kept)]


def way_of_groups(at_once: bool) -> Any:
    """Let groups be normalised in one launch, or one by one."""
    return patch.object(GroupedBatchNorm, "_has_kernel", GroupedBatchNorm._has_kernel if at_once else lambda *_: False)


def train_way(way: str, spec: Any) -> dict[str, float]:
    group, at_once = make_ways()[way]
    with tempfile.TemporaryDirectory() as out, way_of_groups(at_once):
        began = time.perf_counter()
        result = paceline.train(spec.replace({"train.batchnorm_group": group}), out, show=False)
        file = RunDir(result.path).events_file(0)
        steps = [step["step_s"] * 1e3 for step in read_steps(file)]
        print("   ", *(event["execution"] for event in read_events(file, "start")), flush=True)
        found = {"ms": statistics.median(steps[len(steps) // 2 :])}
        if torch.cuda.is_available():
            found["gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        metrics = {key: value for key, value in result.metrics.items() if key == "accuracy"}
        return {**found, **metrics, "whole_s": time.perf_counter() - began}


def in_turns(title: str, ways: list[str], spec: Any, seeds: int, limit: float) -> None:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for seed in range(seeds):
        for way in ways:
            if time.perf_counter() - BEGAN > limit:
                print("the limit is reached", flush=True)
                return
            found[way].append(train_way(way, spec.replace({"train.seed": seed})))
            said = " ".join(f"{key} {value:.5g}" for key, value in found[way][-1].items())
            print(f"{title:22s} {way:18s} seed {seed} {said}", flush=True)
    first = statistics.median(one["ms"] for one in found[ways[0]])
    for way, runs in found.items():
        ms = statistics.median(one["ms"] for one in runs)
        line = f"{title:22s} {way:18s} {ms:8.3f} ms {ms / first - 1:+7.1%}"
        if hits := [one["accuracy"] for one in runs if "accuracy" in one]:
            line += f" accuracy {statistics.mean(hits):.4f} ± {statistics.stdev(hits) if len(hits) > 1 else 0:.4f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--tiny", action="store_true", help="on CPU cores, to try the program")
    given = parser.parse_args()
    if not given.tiny:
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        compare_outputs()
        for form in (torch.channels_last, torch.contiguous_format):
            for channels, side in SHAPES:
                asked = ((None, True), (BATCH, True), (GROUP, True), (GROUP, False))
                each = [time_layer(channels, side, *one, form) for one in asked]
                print(
                    f"{form} {channels} x {side} x {side}: " + " ".join(f"{one:8.1f}" for one in each), "us", flush=True
                )
    plain, groups, single = make_ways()
    train = {"global_batch": BATCH, "precision": "bf16", "warmup": 0.1, "log_every": 5, "checkpoint_every": 1 << 20}
    train |= {"compile": "auto", "weight_decay": 5e-4, "lr": 2e-3}
    common = {"parallel": {"device": "cpu" if given.tiny else "cuda"}}
    guest_modules.TINY = given.tiny
    data = {"path": str(Path(given.data).resolve())} if given.data else {}
    values = {"name": "resnet18", "workload": f"{Path(__file__).resolve()}:Digits", "data": data}
    values |= {"model": {"width": 4}} if given.tiny else {}
    digits = build_spec({**values, **common, "train": {**train, "epochs": given.epochs}})
    in_turns("ResNet-18", [plain, groups], digits, given.seeds, given.limit)
    fifty = {"name": "resnet50", "workload": f"{Path(guest_modules.__file__).resolve()}:ResNet50"}
    train |= {"steps": 120, "schedule": "constant", "evaluate_every": 1 << 20}
    images = build_spec({**fifty, **common, "train": train})
    in_turns("ResNet-50", [plain, groups], images, 2, given.limit)
    in_turns("one by one", [single], digits, 1, given.limit)
    in_turns("one by one, ResNet-50", [single], images, 1, given.limit)
    compiled = digits.replace({"train.compile": "on"})
    in_turns("ResNet-18, compiled", [plain, groups], compiled, 1, given.limit)


if __name__ == "__main__":
    main()
