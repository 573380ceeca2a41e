"""The picture of the README: one run file on several layouts, and how far apart their answers are.

    python benchmarks/picture_parity.py [--runs FOLDER] [--out docs/images/parity.png]

Trains recipes/classifier_docstrings.yaml on 1, 2 and 4 ranks and with 4 accumulated passes, about a minute each on two
cores. Finished runs in FOLDER are drawn without training again; others go on from where they were.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image

mpl.use("Agg")
import matplotlib.pyplot as plt

import paceline
from paceline.io.files import read_json
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import TOLERANCE, compute_relative_difference

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "classifier_docstrings.yaml"
FLOOR = 2e-9  # where differences of exactly 0 are drawn: a logarithm has no place for them
EVERY = 8  # steps between two marks of one layout in the upper panel
INK, GREY, RULES = "#222222", "#6b6b6b", "#e9e9e9"

# name, ranks, accumulated passes, colour (of Okabe and Ito, distinct to colour-blind eyes), mark
LAYOUTS = (
    ("1 rank", 1, 1, INK, ""),
    ("2 ranks", 2, 1, "#E69F00", "o"),
    ("4 ranks", 4, 1, "#0072B2", "s"),
    ("1 rank, 4 passes accumulated", 1, 4, "#CC79A7", "^"),
)


def steps_of(ranks: int, accumulate: int, folder: Path) -> list[dict]:
    """The steps of the recipe on one layout: read from `folder`, or trained into it now."""
    name = f"parity-{ranks}x{accumulate}"
    run = RunDir(folder / name)
    if not (run.summary_file.is_file() and read_json(run.summary_file)["status"] == "finished"):
        spec = paceline.load(RECIPE, {"name": name, "parallel.ranks": ranks, "parallel.threads": 1})
        micro = -(-spec.train.global_batch // (ranks * accumulate))
        begun = run.path if run.spec_file.is_file() else None
        paceline.train(spec.replace({"parallel.micro_batch": micro}), folder, resume=begun)
    return read_steps(run.events_file(0))


def draw(runs: list[list[dict]], out: Path) -> None:
    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GREY})
    plt.rcParams.update({"xtick.color": GREY, "ytick.color": GREY, "axes.titlesize": 12.5})
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(1.3, 1), layout="constrained", facecolor="white"
    )
    one_rank, *others = ([step["loss"] for step in steps] for steps in runs)
    at = np.array([step["step"] for step in runs[0]])
    upper.plot(at, one_rank, color=INK, linewidth=1.2, label=LAYOUTS[0][0])
    most = 0.0
    for index, ((name, _, _, colour, mark), losses) in enumerate(zip(LAYOUTS[1:], others, strict=True)):
        look = {"color": colour, "marker": mark, "linestyle": "none", "label": name, "markeredgecolor": "white"}
        some = slice(index * EVERY // 3, None, EVERY)
        upper.plot(at[some], losses[some], markersize=7, markeredgewidth=0.6, **look)
        differences = np.array([compute_relative_difference(a, b) for a, b in zip(one_rank, losses, strict=True)])
        lower.plot(at, np.maximum(differences, FLOOR), markersize=4.5, markeredgewidth=0.3, **look)
        most = max(most, differences.max())
        print(f"{name}: the loss differs by at most {differences.max():.1e}, by {differences[-1]:.1e} at the end")

    tolerance = TOLERANCE["fp32"]
    upper.set(ylabel="training loss", ylim=(0, None))
    upper.set_title("One run file, four layouts, the same loss at every step", loc="left", fontweight="bold")
    upper.legend(facecolor="white", edgecolor="white", framealpha=1, borderaxespad=0)
    lower.set(yscale="log", ylim=(FLOOR * 0.6, tolerance * 4), xlabel="optimiser step")
    lower.set_ylabel("relative difference\nof the loss to 1 rank")
    lower.set_yticks([FLOOR, 1e-8, 1e-7, 1e-6, 1e-5], ["equal", "$10^{-8}$", "$10^{-7}$", "$10^{-6}$", "$10^{-5}$"])
    lower.minorticks_off()
    lower.axhline(tolerance, color=INK, linestyle=(0, (5, 3)), linewidth=1)
    lower.text(at[-1], tolerance * 1.25, "tolerance of paceline check", ha="right", va="bottom", color=INK)
    digits, power = f"{most:.1e}".split("e")
    largest = f"largest difference: ${digits} \\times 10^{{{int(power)}}}$"
    lower.text(at[-1], 2e-6, largest, ha="right", va="bottom", color=GREY)
    for panel in (upper, lower):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=RULES, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.margins(x=0.015)
    figure.align_ylabels()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    save(figure, out)


def save(figure: plt.Figure, out: Path) -> None:
    """As a PNG of few colours: a third of the size."""
    whole = io.BytesIO()
    figure.savefig(whole, dpi=200)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(whole).convert("RGB")
    picture.quantize(96, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "parity")
    arguments.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images" / "parity.png")
    given = arguments.parse_args()
    draw([steps_of(ranks, accumulate, given.runs) for _, ranks, accumulate, *_ in LAYOUTS], given.out)
    print(given.out)


if __name__ == "__main__":
    main()
