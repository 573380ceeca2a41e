"""The text classifier on one CUDA device: Paceline against the usual script, same tokens, same order, same run.

    python benchmarks/classifier_gpu.py DATA_FOLDER [--steps 1500]

DATA_FOLDER holds AG News as train.csv and test.csv. Prints samples per second, the ratio, and the loss of both after
the same samples.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from usual import train_usual

from gpu import device_name
from paceline import train
from paceline.config import build_spec
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

SIZES = {
    "small": {"width": 128, "heads": 4, "layers": 2, "ffn": 512, "dropout": 0.1},
    "large": {"width": 256, "heads": 8, "layers": 4, "ffn": 1024, "dropout": 0.1},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--usual-steps", type=int, default=400)
    arguments = arguments.parse_args()
    print(f"{device_name()}, torch {torch.__version__}, batch 128, AG News padded to 256 or packed")
    for size, model in SIZES.items():
        spec = build_spec(
            {
                "model": model,
                "data": {"source": "ag_news", "path": str(arguments.data.resolve()), "max_length": 256, "vocab": 16384},
                "train": {
                    "steps": arguments.steps,
                    "global_batch": 128,
                    "precision": "bf16",
                    "compile": "on",  # by itself a run as short as this one compiles nothing
                    "schedule": "constant",
                    "warmup": 0.0,
                    "log_every": 50,
                    "checkpoint_every": 1 << 20,
                    "evaluate_every": 1 << 20,
                },
            }
        )
        workload = build_workload(spec)
        workload.prepare(print)
        rate, losses = train_usual(spec, workload.corpus, "cuda", arguments.usual_steps, workers=4)
        with tempfile.TemporaryDirectory() as out:
            result = train(spec, out, show=False)
            steps = read_steps(RunDir(result.path).events_file(0))
        ours = result.summary.samples_per_s
        last = slice(arguments.usual_steps * 3 // 4, arguments.usual_steps)
        mine = statistics.fmean(step["loss"] for step in steps[last])
        theirs = statistics.fmean(losses[last])
        print(f"{size}: usual script {rate:,.0f} samples/s, Paceline {ours:,.0f} samples/s, ratio {ours / rate:.1f}x")
        print(f"{size}: mean loss of steps {last.start} to {last.stop}: usual {theirs:.4f}, Paceline {mine:.4f}")
        print(f"{size}: {result.summary.median}, test accuracy {result.metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
