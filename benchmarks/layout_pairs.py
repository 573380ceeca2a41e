"""Save on one layout and go on under another: random pairs against the uninterrupted run on one rank.

    python benchmarks/layout_pairs.py [--pairs 30] [--seed 0]
    torchrun --nproc-per-node 4 benchmarks/layout_pairs.py --stage save --folder F     # then 2 and 1, then resume

A tiny language model with experts, 4 steps, of which the second layout makes the last 2; every sixth pair is of one
layout. Exits with 1 if a loss or a gradient norm differs by more than 1e-5, a tensor by more than 1e-4 of its norm, or,
where both layouts are the same, by a bit. Under torchrun, which starts the ranks once for all pairs, stages follow each
other: save and resume with 1, 2 and 4 ranks each, then compare without it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from layout_matrix import DENSE, TEXTS

from paceline import RunResult, resume, train
from paceline.config import build_spec
from paceline.layout import parse_layout
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import compare_weights, compute_relative_difference

LAYOUTS = (
    *("single", "ddp:2", "zero1:2", "zero2:2", "fsdp:2", "context:2", "fsdp:2+context:2", "ddp:2+expert:2"),
    *("fsdp:4+expert:2", "tensor:2", "fsdp:2+tensor:2", "pipeline:2", "pipeline:2:interleaved", "fsdp:2+pipeline:2"),
    *("tensor:2+pipeline:2", "context:2+pipeline:2", "ddp:2+pipeline:2+expert:2"),
)
AXES = ("tensor", "context", "expert", "pipeline")


class Pair(NamedTuple):
    number: int
    first: str
    second: str


def choose(layout: str) -> dict[str, Any]:
    axes = {**dict.fromkeys(AXES, 1), "schedule": "1f1b", "strategy": "auto", "ranks": 1, **parse_layout(layout)}
    return {f"parallel.{name}": value for name, value in axes.items()}


def compare(whole: Path, cut: Path) -> tuple[float, float]:
    """Return the largest difference of losses and norms, and of a tensor."""
    pairs = zip(*(read_steps(RunDir(path).events_file(0)) for path in (whole, cut)), strict=True)
    steps = [compute_relative_difference(a[key], b[key]) for a, b in pairs for key in ("loss", "grad_norm")]
    return max(steps), compare_weights(*(RunResult(path, None).weights() for path in (whole, cut))).value


def save(spec: Any, pair: Pair, scratch: Path) -> None:
    """Train on the first layout, and forget the last checkpoint of a copy."""
    folder = train(spec.replace(choose(pair.first)), scratch / str(pair.number), show=False).path
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(folder, scratch / f"{pair.number}-uncut")
        shutil.rmtree(folder / "checkpoints" / "step-00000004")


def go_on(pair: Pair, scratch: Path) -> None:
    (folder,) = (scratch / str(pair.number)).iterdir()
    resume(folder, choose(pair.second), show=False)


def judge(pair: Pair, whole: Path, scratch: Path) -> bool:
    """Print how far the two halves are from the whole; return whether that is within the tolerance."""
    (folder,) = (scratch / str(pair.number)).iterdir()
    steps, weights = compare(whole, folder)
    holds = steps <= 1e-5 and weights <= 1e-4
    if pair.first == pair.second:
        holds &= compare(scratch / f"{pair.number}-uncut", folder) == (0.0, 0.0)
    verdict = "" if holds else " WRONG"
    print(f"{pair.first} -> {pair.second}: steps {steps:.1e} weights {weights:.1e}{verdict}", flush=True)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", choices=("save", "resume", "compare"), help="only this one, in --folder")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    drawn, pairs = random.Random(asked.seed), []
    for number in range(asked.pairs):
        first, second = drawn.choice(LAYOUTS), drawn.choice(LAYOUTS)
        pairs.append(Pair(number, first, first if number % 6 == 5 else second))  # of the same, nothing may differ
    values = {"workload": "lm", "model": {**DENSE, "experts": 4, "ffn": 32}, "data": TEXTS}
    values["train"] = {"steps": 4, "checkpoint_every": 2, "global_batch": 16, "lr": 1e-3, "evaluate_on": 8}
    spec = build_spec({**values, "parallel": {"threads": 1, "timeout_s": 300}})
    launched = int(os.environ.get("WORLD_SIZE", "0"))
    with tempfile.TemporaryDirectory() as temporary:
        scratch = asked.folder or Path(temporary)
        if asked.stage in (None, "compare"):
            whole = train(spec, scratch / "whole", show=False).path
        wrong = 0
        for pair in pairs:
            if asked.stage in (None, "save") and launched in (0, parse_layout(pair.first)["ranks"]):
                save(spec, pair, scratch)
            if asked.stage in (None, "resume") and launched in (0, parse_layout(pair.second)["ranks"]):
                go_on(pair, scratch)
            if asked.stage in (None, "compare"):
                wrong += not judge(pair, whole, scratch)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
