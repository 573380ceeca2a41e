"""Pictures: shown where no file is named, else written and closed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from paceline.io.escape import escape_hidden
from paceline.tinytopics.colors import scale_color_tinytopics
from paceline.workloads.topics.result.model import average_neighbours

Palette = Sequence[str] | str | None
USUAL_COLUMNS = 5  # of the charts of terms


def plot_loss(
    losses: Sequence[float],
    figsize: tuple[int, int] = (10, 8),
    dpi: int = 300,
    title: str = "Loss curve",
    color_palette: Palette = None,
    output_file: str | None = None,
) -> None:
    """The loss of every epoch."""
    figure, axes = plt.subplots(figsize=figsize, dpi=dpi)
    axes.plot(losses, color=color_palette if isinstance(color_palette, str) else _colours(color_palette, 1)[0])
    axes.set(title=title, xlabel="Epochs", ylabel="Loss")
    _show(figure, output_file, dpi)


def plot_structure(
    L_matrix: Any,
    normalize_rows: bool = False,
    figsize: tuple[int, int] = (12, 6),
    dpi: int = 300,
    title: str = "Structure Plot",
    color_palette: Palette = None,
    output_file: str | None = None,
) -> None:
    """Every document, in the order given, as a stacked bar of its topics. `normalize_rows` makes them sum to one.

    Documents that share a pixel are drawn as their mean.
    """
    shares = np.asarray(L_matrix)
    if normalize_rows:
        shares = shares / shares.sum(axis=1, keepdims=True)
    documents, topics = shares.shape
    bars = average_neighbours(shares, np.arange(documents), math.ceil(figsize[0] * dpi))
    edges, tops = np.linspace(0, documents, len(bars) + 1), np.cumsum(bars, axis=1)
    figure, axes = plt.subplots(figsize=figsize, dpi=dpi)
    for topic, colour in enumerate(_colours(color_palette, topics)):
        below = tops[:, topic] - bars[:, topic]
        axes.stairs(tops[:, topic], edges, baseline=below, fill=True, color=colour)
    axes.set(title=title, xlabel="Documents (sorted)", ylabel="Topic Proportions", xlim=(0, documents), ylim=(0, 1))
    figure.tight_layout()
    _show(figure, output_file, dpi)


def plot_top_terms(
    F_matrix: Any,
    n_top_terms: int = 10,
    term_names: Sequence[str] | None = None,
    figsize: tuple[int, int] = (10, 8),
    dpi: int = 300,
    title: str = "Top Terms",
    color_palette: Palette = None,
    nrows: int | None = None,
    ncols: int | None = None,
    output_file: str | None = None,
) -> None:
    """The most probable terms of every topic, a chart of bars for each, on a grid of `nrows` by `ncols`."""
    shares = np.asarray(F_matrix)
    top = np.argsort(-shares, axis=1)[:, :n_top_terms]
    names = top.astype(str) if term_names is None else np.asarray(term_names)[top]
    farthest = 1.1 * np.take_along_axis(shares, top, axis=1).max()
    figure, grid = plt.subplots(
        *_grid(len(shares), nrows, ncols), figsize=figsize, dpi=dpi, layout="constrained", squeeze=False
    )
    for topic, colour in enumerate(_colours(color_palette, len(shares))):
        axes, places = grid.flat[topic], np.arange(top.shape[1])[::-1]
        axes.barh(places, shares[topic, top[topic]], color=colour)
        axes.set_yticks(places, [escape_hidden(str(name)) for name in names[topic]])
        axes.set(xlabel="Probability", title=f"Topic {topic}", xlim=(0, farthest))
    for unused in grid.flat[len(shares) :]:
        unused.remove()
    figure.suptitle(title)
    _show(figure, output_file, dpi, bbox_inches="tight")


def _grid(charts: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    if columns is None:
        columns = USUAL_COLUMNS if rows is None else -(-charts // rows)
    return rows or -(-charts // columns), columns


def _colours(palette: Palette, count: int) -> list[Any]:
    """Those given, over and over where they are fewer; a single one is for the loss alone."""
    if palette is None or isinstance(palette, str):
        scale = scale_color_tinytopics(count)
        return [scale(at) for at in range(count)]
    return list(islice(cycle(palette), count))


def _show(figure: Any, output_file: str | None, dpi: int, **options: Any) -> None:
    if not output_file:
        plt.show()
        return
    try:
        plt.savefig(output_file, dpi=dpi, **options)
    finally:
        plt.close(figure)
