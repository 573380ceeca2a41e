"""The text classifier on CPU cores: three ratios, each measured in one run with its parts taking turns.

    python benchmarks/classifier_cpu.py [DATA_FOLDER]

    usual       Paceline on 1 rank against nn.TransformerEncoder with padding, DataLoader, fp32: samples per second
    overhead    a step of Paceline's loop against a hand-written DistributedDataParallel loop, same model and batches
    joint       2 ranks of one thread against two independent one-thread runs started together, 128 samples per rank
                and step in both: the machine's own limit

DATA_FOLDER holds AG News as train.csv and test.csv; without it the docstrings of the installed packages are used.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hand_written import compare_steps
from usual import train_usual

from paceline.config import RunSpec, build_spec
from paceline.io.files import read_json
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

ROUNDS = 3


def spec_of(data: Path | None, **train: object) -> RunSpec:
    source = {"source": "ag_news", "path": str(data.resolve())} if data else {"source": "docstrings"}
    return build_spec(
        {
            "model": {"width": 128, "heads": 4, "layers": 2, "ffn": 512, "dropout": 0.1},
            "data": {**source, "max_length": 256, "vocab": 16384},
            "train": {
                "global_batch": 128,
                "schedule": "constant",
                "warmup": 0.0,
                "checkpoint_every": 1 << 20,
                "evaluate_every": 1 << 20,
                **train,
            },
        }
    )


def train_apart(spec: RunSpec, out: Path, together: int = 1) -> float:
    """Samples per second of `together` runs in processes of their own, started at once."""
    run_file = RunDir.claim(out, "spec", spec).spec_file
    command = [sys.executable, "-m", "paceline", "train", str(run_file), "--quiet", "--out"]
    folders = [Path(tempfile.mkdtemp(dir=out)) for _ in range(together)]
    for process in [subprocess.Popen([*command, str(folder)]) for folder in folders]:
        assert process.wait() == 0
    return sum(read_json(next(folder.glob("*/summary.json")))["samples_per_s"] for folder in folders)


def usual(data: Path | None, out: Path) -> None:
    steps = 30
    spec = spec_of(data, steps=steps)
    workload = build_workload(spec)
    workload.prepare(print)
    theirs, ours = [], []
    for _ in range(ROUNDS):
        rate, losses = train_usual(spec, workload.corpus, "cpu", steps, workers=0)
        theirs.append(rate)
        run = train_apart(spec, out)
        ours.append(run)
    last = max(out.glob("*/*/summary.json"), key=os.path.getmtime)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"usual: {b:.1f} samples/s, Paceline {a:.1f} samples/s: {a / b:.2f}x")
    ours_last, theirs_last = read_json(last)["loss_last"], statistics.fmean(losses[-10:])
    print(f"usual: mean loss of the last 10 of {steps} steps {theirs_last:.4f}, Paceline {ours_last:.4f}")


def overhead(data: Path | None, out: Path) -> None:
    from paceline.launch.local import run_ranks

    spec = spec_of(data, steps=10_000).replace({"parallel.ranks": 2, "parallel.threads": 1})
    build_workload(spec).prepare(print)
    hand, ours = run_ranks(compare_steps, (spec, str(out), ROUNDS), 2)[0]
    print(f"overhead: hand-written DDP step {hand * 1e3:.1f} ms, Paceline {ours * 1e3:.1f} ms: {ours / hand - 1:+.1%}")


def joint(data: Path | None, out: Path) -> None:
    steps = 30
    together = spec_of(data, steps=steps, global_batch=256).replace({"parallel.ranks": 2, "parallel.threads": 1})
    alone = spec_of(data, steps=steps).replace({"parallel.threads": 1})
    two, apart = [], []
    for _ in range(ROUNDS):
        apart.append(train_apart(alone, out, together=2))
        two.append(train_apart(together, out))
    a, b = statistics.median(two), statistics.median(apart)
    print(f"joint: two independent runs {b:.1f} samples/s, 2 ranks {a:.1f} samples/s: {a / b:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", choices=["usual", "overhead", "joint"])
    arguments = parser.parse_args()
    for part in (usual, overhead, joint):
        if arguments.only in (None, part.__name__):
            with tempfile.TemporaryDirectory() as out:
                part(arguments.data, Path(out))


if __name__ == "__main__":
    main()
