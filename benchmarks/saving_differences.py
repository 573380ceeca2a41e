"""How far the modes that send less end from plain data parallelism: the table in parallel/differences.yaml.

    python benchmarks/saving_differences.py [--modes powersgd diloco] [--seeds 0 1 2]

Trains recipes/classifier_docstrings.yaml on 2 ranks, from several seeds, and compares the last evaluation with that of
`exact` from the same seed. The line of `exact` says how far seeds are from each other: differences below it may be
chance. Exits with 1 where a mode is further away than the table says, by more than a factor of 2 and half a percent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from paceline import load, train
from paceline.parallel.compress import DIFFERENCES

MODES = DIFFERENCES["modes"]
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "classifier_docstrings.yaml"
FACTOR, SLACK = 2.0, 0.005


def final(mode: str, seed: int, out: Path) -> dict[str, float]:
    changes = {"parallel.ranks": 2, "parallel.threads": 1, "parallel.reduce": mode, "train.seed": seed}
    return train(load(RECIPE, changes), out, show=False).metrics


def holds(mode: str, loss: float) -> bool:
    """Whether a difference is about what the table says."""
    return abs(loss) <= FACTOR * MODES[mode]["most"] + SLACK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=[*MODES], default=[*MODES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exact = {seed: final("exact", seed, Path(folder)) for seed in asked.seeds}
        losses = [metrics["loss"] for metrics in exact.values()]
        apart = (max(losses) - min(losses)) / statistics.fmean(losses)
        print(f"{'exact':>10}: loss {statistics.fmean(losses):.4f}, seeds {apart:.2%} apart", flush=True)
        within = True
        for mode in asked.modes:
            found = {seed: final(mode, seed, Path(folder)) for seed in asked.seeds}
            each = [found[seed]["loss"] / exact[seed]["loss"] - 1 for seed in asked.seeds]
            loss, most = statistics.fmean(each), max(map(abs, each))
            accuracy = statistics.fmean(found[seed]["accuracy"] - exact[seed]["accuracy"] for seed in asked.seeds)
            within &= holds(mode, loss)
            by_seed = ", ".join(f"{d:+.2%}" for d in each)
            print(f"{mode:>10}: ({loss:.4f}, {most:.4f}, {accuracy:.4f})   loss by seed {by_seed}", flush=True)
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
