"""Members beside their ensemble, as pictures in the run's folder; its report shows them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.record.files import write_atomic
from paceline.record.run_dir import RunDir
from paceline.reporting.style import drawing, literal
from paceline.workloads.ensemble.scoring import BINS, ENSEMBLE, LOWER, Scores

OURS, OTHERS = "#d97706", "#2563eb"
SHADES = ("#2563eb", "#059669", "#9333ea", "#0891b2", "#be185d", "#65a30d")


@drawing({})
def write_members(scores: Scores, folder: Path, step: int) -> None:
    """Each metric with its bootstrap error, one row for each model."""
    from matplotlib.figure import Figure

    names = list(scores.each)[::-1]
    metrics = list(scores.each[ENSEMBLE])
    figure = Figure(figsize=(2.6 * len(metrics) + 1, 0.9 + 0.42 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for place, name in enumerate(names):
            found = scores.each[name][metric]
            colour = OURS if name == ENSEMBLE else OTHERS
            axes.errorbar(found.value, place, xerr=found.error, fmt="o", color=colour, capsize=3)
            axes.annotate(str(found), (found.value, place), (0, 6), textcoords="offset points", ha="center", fontsize=7)
        axes.set_title(f"{metric.replace('_', ' ')} ({'lower' if metric in LOWER else 'higher'} is better)", fontsize=8)
        axes.set_yticks(range(len(names)), literal(names))
        axes.set_ylim(-0.5, len(names) - 0.3)
        axes.margins(x=0.25)
        axes.tick_params(labelsize=8)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, folder, f"members-{step:06d}.png")


@drawing({})
def write_reliability(outputs: Mapping[str, np.ndarray], truth: np.ndarray, folder: Path, step: int) -> None:
    """How often the likeliest class was right, by the probability that it was given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.8), layout="constrained")
    axes = figure.subplots()
    least = 1.0
    for number, (name, found) in enumerate(outputs.items()):
        said, right = found.max(1), found.argmax(1) == truth
        groups = [some for some in np.array_split(np.argsort(said, kind="stable"), BINS) if len(some)]
        at, held = ([float(values[some].mean()) for some in groups] for values in (said, right))
        least = min(least, *at, *held)
        colour, width = (OURS, 2) if name == ENSEMBLE else (SHADES[number % len(SHADES)], 1)
        axes.plot(at, held, marker="o", markersize=3, linewidth=width, color=colour, label=literal(name))
    axes.plot([least, 1], [least, 1], color="#9ca3af", linewidth=0.8, linestyle="--")
    axes.set_xlabel("probability of the likeliest class")
    axes.set_ylabel("how often it was right")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, folder, f"reliability-{step:06d}.png")


def _save(figure: Any, folder: Path, name: str) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    pictures = RunDir(folder).pictures
    pictures.mkdir(exist_ok=True)
    write_atomic(pictures / name, content.getvalue())
