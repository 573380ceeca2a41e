"""Save on one layout and go on under another: random pairs against the uninterrupted run on one rank.

    python benchmarks/layout_pairs.py [--pairs 30] [--seed 0]

A tiny language model with experts, 4 steps, of which the second layout makes the last 2; every sixth pair is of one
layout. Exits with 1 if a loss or a
gradient norm differs by more than 1e-5, a tensor by more than 1e-4 of its norm, or, where both layouts are the same, by
a bit.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def choose(layout: str) -> dict[str, Any]:
    axes = {**dict.fromkeys(AXES, 1), "schedule": "1f1b", "strategy": "auto", "ranks": 1, **parse_layout(layout)}
    return {f"parallel.{name}": value for name, value in axes.items()}


def compare(whole: Path, cut: Path) -> tuple[float, float]:
    """Return the largest difference of losses and norms, and of a tensor."""
    pairs = zip(*(read_steps(RunDir(path).events_file(0)) for path in (whole, cut)), strict=True)
    steps = [compute_relative_difference(a[key], b[key]) for a, b in pairs for key in ("loss", "grad_norm")]
    return max(steps), compare_weights(*(RunResult(path, None).weights() for path in (whole, cut))).value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    drawn, wrong = random.Random(asked.seed), 0
    values = {"workload": "lm", "model": {**DENSE, "experts": 4, "ffn": 32}, "data": TEXTS}
    values["train"] = {"steps": 4, "checkpoint_every": 2, "global_batch": 16, "lr": 1e-3, "evaluate_on": 8}
    spec = build_spec({**values, "parallel": {"threads": 1, "timeout_s": 300}})
    with tempfile.TemporaryDirectory() as scratch:
        whole = train(spec, f"{scratch}/whole", show=False).path
        for number in range(asked.pairs):
            first, second = drawn.choice(LAYOUTS), drawn.choice(LAYOUTS)
            second = first if number % 6 == 5 else second  # of which nothing may differ
            folder = train(spec.replace(choose(first)), f"{scratch}/{number}", show=False).path
            uncut = shutil.copytree(folder, f"{scratch}/{number}-uncut")
            shutil.rmtree(folder / "checkpoints" / "step-00000004")
            resume(folder, choose(second), show=False)
            steps, weights = compare(whole, folder)
            holds = steps <= 1e-5 and weights <= 1e-4
            if first == second:
                holds &= compare(Path(uncut), folder) == (0.0, 0.0)
            wrong += not holds
            print(
                f"{first} -> {second}: steps {steps:.1e} weights {weights:.1e}{'' if holds else ' WRONG'}", flush=True
            )
            shutil.rmtree(folder)
            shutil.rmtree(uncut)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
