"""The picture of the README: one run file on several layouts, and how far apart their answers are.

    python benchmarks/picture_parity.py [--runs FOLDER] [--out docs/images/parity.png]

Trains recipes/classifier_docstrings.yaml on 1, 2 and 4 ranks and with 4 accumulated passes, about a minute each on two
cores. Runs that are in FOLDER already are drawn without training again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import paceline
from paceline.parity import apart
from paceline.record.events import read_steps
from paceline.record.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "classifier_docstrings.yaml"
TOLERANCE = 1e-5

# name, ranks, accumulated passes, colour (Okabe and Ito, told apart without red and green), dashes, width
LAYOUTS = (
    ("1 rank", 1, 1, "#000000", "-", 4.5),
    ("2 ranks", 2, 1, "#E69F00", "-", 2.4),
    ("4 ranks", 4, 1, "#0072B2", (0, (4, 3)), 1.6),
    ("1 rank, 4 accumulated", 1, 4, "#CC79A7", (0, (1, 2)), 1.8),
)


def steps_of(ranks: int, accumulate: int, folder: Path) -> list[dict]:
    """The steps of the recipe on one layout: read from `folder`, or trained into it now."""
    name = f"parity-{ranks}x{accumulate}"
    run = RunDir(folder / name)
    if not run.summary_file.is_file():
        spec = paceline.load(RECIPE, {"name": name, "parallel.ranks": ranks})
        micro = -(-spec.train.global_batch // (ranks * accumulate))
        paceline.train(spec.replace({"parallel.micro_batch": micro}), folder)
    return read_steps(run.events_file(0))


def draw(runs: list[list[dict]], out: Path) -> None:
    plt.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans", "axes.linewidth": 0.8})
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(1.35, 1), layout="constrained", facecolor="white"
    )
    reference = runs[0]
    for (name, _, _, colour, dashes, width), steps in zip(LAYOUTS, runs, strict=True):
        at = [step["step"] for step in steps]
        look = {"color": colour, "label": name}
        upper.plot(at, [step["loss"] for step in steps], linestyle=dashes, linewidth=width, **look)
        if steps is not reference:
            differences = [apart(a["loss"], b["loss"]) for a, b in zip(reference, steps, strict=True)]
            shown = [d if d else float("nan") for d in differences]
            lower.plot(at, shown, linewidth=1.2, **look)
            print(f"{name}: the loss differs by at most {max(differences):.1e}, by {differences[-1]:.1e} at the end")
    upper.set_ylabel("training loss")
    upper.set_ylim(bottom=0)
    upper.set_title("One run file, four layouts: the same curve", loc="left", fontweight="bold")
    upper.legend(frameon=False, handlelength=3)
    lower.set_yscale("log")
    lower.axhline(TOLERANCE, color="#555555", linestyle="--", linewidth=1)
    lower.set_ylabel("relative difference\nto 1 rank")
    lower.set_xlabel("step")
    for panel in (upper, lower):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.margins(x=0.01)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "parity")
    arguments.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images" / "parity.png")
    given = arguments.parse_args()
    draw([steps_of(ranks, accumulate, given.runs) for _, ranks, accumulate, *_ in LAYOUTS], given.out)
    print(given.out)


if __name__ == "__main__":
    main()
