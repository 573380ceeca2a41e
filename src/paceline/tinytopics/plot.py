"""Plots, shown unless a file is named, and the colours of tinytopics."""

import math
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from paceline.io.escape import escape_hidden
from paceline.workloads.topics.result.model import average_neighbours

Palette = Sequence[str] | str | None
DEFAULT_COLUMNS = 5  # of the charts of terms
Colours = NDArray[np.float64]
OBSERVABLE_10 = (
    "#4269D0", "#EFB118", "#3CA951", "#FF725C", "#A463F2", "#9C6B4E", "#FF8AB7", "#9498A0", "#6CC5B0", "#97BBF5",
)  # fmt: skip  # the palette of Observable Plot, each hue where matplotlib's tab10 has it

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
D65 = np.array([0.95047, 1.0, 1.08883])  # the white point of sRGB
CUBE_ABOVE = 6 / 29  # CIELAB is a cube root above the cube of this share of white, and linear below it


def plot_loss(
    losses: Sequence[float],
    figsize: tuple[int, int] = (10, 8),
    dpi: int = 300,
    title: str = "Loss curve",
    color_palette: Palette = None,
    output_file: str | None = None,
) -> None:
    """Plot the loss of every epoch."""
    figure, axes = plt.subplots(figsize=figsize, dpi=dpi)
    axes.plot(losses, color=color_palette if isinstance(color_palette, str) else _choose_colours(color_palette, 1)[0])
    axes.set(title=title, xlabel="Epochs", ylabel="Loss")
    _show_or_save(figure, output_file, dpi)


def plot_structure(
    L_matrix: Any,
    normalize_rows: bool = False,
    figsize: tuple[int, int] = (12, 6),
    dpi: int = 300,
    title: str = "Structure Plot",
    color_palette: Palette = None,
    output_file: str | None = None,
) -> None:
    """Plot documents in the order given as stacked bars of their topics; those that share a pixel as their mean."""
    shares = np.asarray(L_matrix)
    if normalize_rows:
        shares = shares / shares.sum(axis=1, keepdims=True)
    documents, topics = shares.shape
    bars = average_neighbours(shares, np.arange(documents), math.ceil(figsize[0] * dpi))
    edges, tops = np.linspace(0, documents, len(bars) + 1), np.cumsum(bars, axis=1)
    figure, axes = plt.subplots(figsize=figsize, dpi=dpi)
    for topic, colour in enumerate(_choose_colours(color_palette, topics)):
        below = tops[:, topic] - bars[:, topic]
        axes.stairs(tops[:, topic], edges, baseline=below, fill=True, color=colour)
    axes.set(title=title, xlabel="Documents (sorted)", ylabel="Topic Proportions", xlim=(0, documents), ylim=(0, 1))
    figure.tight_layout()
    _show_or_save(figure, output_file, dpi)


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
    """Plot the most probable terms of every topic as bars, on a grid of `nrows` by `ncols`."""
    shares = np.asarray(F_matrix)
    top = np.argsort(-shares, axis=1)[:, :n_top_terms]
    names = top.astype(str) if term_names is None else np.asarray(term_names)[top]
    farthest = 1.1 * np.take_along_axis(shares, top, axis=1).max()
    columns = ncols or (DEFAULT_COLUMNS if nrows is None else -(-len(shares) // nrows))
    rows = nrows or -(-len(shares) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=figsize, dpi=dpi, layout="constrained", squeeze=False)
    for topic, colour in enumerate(_choose_colours(color_palette, len(shares))):
        axes, places = grid.flat[topic], np.arange(top.shape[1])[::-1]
        axes.barh(places, shares[topic, top[topic]], color=colour)
        axes.set_yticks(places, [escape_hidden(str(name)) for name in names[topic]])
        axes.set(xlabel="Probability", title=f"Topic {topic}", xlim=(0, farthest))
    for unused in grid.flat[len(shares) :]:
        unused.remove()
    figure.suptitle(title)
    _show_or_save(figure, output_file, dpi, bbox_inches="tight")


def _choose_colours(palette: Palette, count: int) -> list[Any]:
    """Return the given colours, repeated if they are fewer; a single one is for the loss alone."""
    if palette is None or isinstance(palette, str):
        scale = scale_color_tinytopics(count)
        return [scale(at) for at in range(count)]
    return list(islice(cycle(palette), count))


def _show_or_save(figure: Any, output_file: str | None, dpi: int, **options: Any) -> None:
    if not output_file:
        plt.show()
        return
    try:
        plt.savefig(output_file, dpi=dpi, **options)
    finally:
        plt.close(figure)


def pal_tinytopics(format: Literal["hex", "rgb", "lab"] = "hex") -> Any:
    """Return ten colours as texts, or as an array (10, 3) of sRGB from 0 to 1 or of CIELAB."""
    if format not in ("hex", "rgb", "lab"):
        raise ValueError(f"Format must be 'hex', 'rgb', or 'lab', not {format!r}.")
    if format == "hex":
        return list(OBSERVABLE_10)
    rgb = np.array([to_rgb(colour) for colour in OBSERVABLE_10])
    return rgb if format == "rgb" else convert_rgb_to_lab(rgb)


def scale_color_tinytopics(n: int) -> ListedColormap:
    """Return n of the ten colours or, for more, n points on a smooth curve through them, in CIELAB."""
    rgb = pal_tinytopics("rgb")
    if n > len(rgb):
        curve = CubicSpline(np.linspace(0, 1, len(rgb)), convert_rgb_to_lab(rgb))
        rgb = convert_lab_to_rgb(curve(np.linspace(0, 1, n)))
    return ListedColormap(rgb[:n])


def convert_rgb_to_lab(rgb: Colours) -> Colours:
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = linear @ TO_XYZ.T / D65
    root = np.where(share > CUBE_ABOVE**3, np.cbrt(share), share / (3 * CUBE_ABOVE**2) + 4 / 29)
    x, y, z = root.T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def convert_lab_to_rgb(lab: Colours) -> Colours:
    """Clip colours that a screen does not have, channel by channel."""
    y = (lab[:, 0] + 16) / 116
    root = np.stack([y + lab[:, 1] / 500, y, y - lab[:, 2] / 200], axis=1)
    share = np.where(root > CUBE_ABOVE, root**3, 3 * CUBE_ABOVE**2 * (root - 4 / 29))
    linear = np.clip((share * D65) @ np.linalg.inv(TO_XYZ).T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
