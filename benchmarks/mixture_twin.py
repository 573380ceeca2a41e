"""A mixture of experts and the dense model that computes as much per token: held-out loss by computed FLOPs.

    nice python benchmarks/mixture_twin.py TEXTS [--steps 500] [--seeds 0] [--figure docs/images/mixture_twin.svg]

TEXTS is a file, folder or pattern of texts, such as the validation and test texts of WikiText-2 (2.4 MB). Both models
see the same tokens in the same order, on one core. The mixture balances its experts by a loss or by biases. A row for
each: the last held-out loss, the FLOPs to the last loss of the dense model, and the load of the busiest expert.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import train
from paceline.config import build_spec
from paceline.reports.figures import use_plot_style, write_figure
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

DENSE = {"preset": "custom", "width": 96, "heads": 4, "layers": 3, "ffn": 512}
MIXTURE = DENSE | {"ffn": 256, "experts": 8, "top_k": 2}
MODELS = {
    "dense": DENSE,
    "mixture, by loss": MIXTURE | {"balance_by": "loss"},
    "mixture, by bias": MIXTURE | {"balance_by": "bias", "balance": 0.05},
}
Curve = list[tuple[float, float, float]]  # (computed FLOPs, held-out loss, load of the busiest expert)


def learn(name: str, texts: Path, steps: int, seed: int, out: Path) -> Curve:
    """Train a model; return what its evaluations found."""
    values: dict[str, Any] = {"name": f"{name.split()[-1]}-{seed}", "workload": "lm", "model": MODELS[name]}
    values["data"] = {"source": "text", "path": str(texts), "sequence": 64, "vocab": 1024}
    values["train"] = {"steps": steps, "global_batch": 16, "lr": 3e-3, "warmup": 0.1, "seed": seed}
    values["train"] |= {"evaluate_every": max(1, steps // 10), "evaluate_on": 256}
    spec = build_spec({**values, "parallel": {"threads": 1}})
    workload = build_workload(spec)
    workload.prepare(lambda line: None)
    before, layers, after = workload.costs(workload.model())
    per_sample = (before + sum(layers) + after) * 64
    events = read_events(RunDir(train(spec, out, show=False).path).events_file(0), "evaluate")
    curve = [(e["step"] * 16 * per_sample, e["loss"], e.get("busiest_expert", 1.0)) for e in events]
    return curve[1:]  # at the first the loss still falls steeply


def reach(curve: Curve, loss: float) -> float | None:
    """Return the FLOPs at which a curve reaches a loss, between two evaluations in proportion."""
    for (flops, above, _), (later, below, _) in pairwise(curve):
        if below <= loss <= above:
            return flops + (later - flops) * (above - loss) / (above - below)
    return None


def draw(curves: dict[str, list[Curve]], file: Path) -> None:
    with use_plot_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        styles = (("#6b7280", "-"), ("#2563eb", "-"), ("#d97706", "--"))
        for (colour, line), (name, seeds) in zip(styles, curves.items(), strict=True):
            for index, curve in enumerate(seeds):
                flops, losses, _ = zip(*curve, strict=True)
                label = None if index else name
                axes.plot([f / 1e12 for f in flops], losses, line, color=colour, linewidth=1.2, label=label)
        axes.set(xlabel="computed TFLOP", ylabel="held-out loss")
        axes.legend()
        write_figure(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    curves: dict[str, list[Curve]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in asked.seeds:
            for name, found in curves.items():
                found.append(learn(name, asked.texts, asked.steps, seed, Path(folder)))
                flops, loss, busiest = found[-1][-1]
                needed = reach(found[-1], curves["dense"][-1][-1][1])
                share = "" if needed is None else f"{needed / curves['dense'][-1][-1][0]:.0%} of the FLOPs of dense"
                print(
                    f"{name:18} seed {seed}: loss {loss:.4f} after {flops:.3e} FLOPs; {share}; {busiest:.2f}",
                    flush=True,
                )
    if asked.figure:
        draw(curves, asked.figure)


if __name__ == "__main__":
    main()
