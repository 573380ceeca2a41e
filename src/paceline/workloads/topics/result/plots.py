"""Plots of a fit: its loss, the mixtures of its documents, the terms of its topics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InvalidValue
from paceline.io.escape import to_one_line
from paceline.reports.figures import FORMATS, INK, use_plot_style, write_figure
from paceline.workloads.topics.result.model import (
    as_matrix,
    average_neighbours,
    find_largest,
    find_top_terms,
    sort_documents,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = (
    "#2563eb", "#d97706", "#059669", "#d2c3ff", "#5a3c78", "#871e00", "#96e187", "#5ae1c3", "#9678d2", "#ffc300",
    "#b478a5", "#782d4b", "#4b3ca5", "#e11e4b", "#b44b0f", "#96c34b", "#ff8796", "#4b693c", "#4b87ff", "#964b78",
)  # fmt: skip
"""Each as far as possible from those before it, also for colour-blind readers."""
REST = "#c4c9d1"
COLUMNS = 1600  # of the structure plot: more documents are averaged
MAX_TERM_PLOTS = 24
LONGEST_TERM = 22
PLOT_SETTINGS = {"text.parse_math": False}
OutputFile = str | Path | None


def plot_loss(losses: Any, title: str = "Loss", output_file: OutputFile = None) -> "Figure":
    """Plot the loss after each pass."""
    values = np.asarray([float(v) for v in getattr(losses, "losses", losses)])
    if not values.size:
        raise InvalidValue("there are no losses to plot", key="losses")
    with _open_figure((6.4, 3.6), output_file) as figure:
        axes = figure.add_subplot()
        axes.plot(np.arange(1, len(values) + 1), values, color=PALETTE[0], marker="o" if len(values) < 30 else None)
        axes.set(title=title, ylabel="loss", xlabel="pass")
        axes.ticklabel_format(axis="y", useOffset=False, style="plain")
        low, high = np.nanmin(values), np.nanmax(values[min(len(values) - 1, len(values) // 20) :])
        if high > low:  # the fall of the first passes would flatten all that follows
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def plot_structure(
    L: Any,
    title: str = "Structure of the documents",
    output_file: OutputFile = None,
    *,
    topic_names: Sequence[str] | None = None,
) -> "Figure":
    """Plot every document as a stacked bar of its topics; of many topics, small ones as one."""
    shares = _read_shares(L)
    documents = len(shares)
    kept = np.sort(find_largest(shares.mean(axis=0, dtype=np.float64), len(PALETTE)))
    stacked, labels, colours = _merge_others(shares, kept, topic_names)
    order = sort_documents(shares)  # documents of topics that are not drawn on their own come last
    order = order[np.argsort(~np.isin(shares.argmax(axis=1)[order], kept), kind="stable")]
    with _open_figure((9.0, 3.9), output_file) as figure:
        axes = figure.add_subplot()
        columns = average_neighbours(stacked, order, COLUMNS)
        edges, tops = np.linspace(0, documents, len(columns) + 1), np.cumsum(columns, axis=1)
        for at, colour in enumerate(colours):
            axes.stairs(tops[:, at], edges, baseline=tops[:, at] - columns[:, at], fill=True, color=colour)
        axes.set(xlim=(0, documents), ylim=(0, 1), title=title, ylabel="share of the document")
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_xlabel(f"{documents:,} documents")
        axes.spines[["left", "bottom"]].set_visible(False)
        _draw_topic_legend(figure, labels, colours)
    return figure


def plot_top_terms(
    F: Any,
    n_top_terms: int = 10,
    term_names: Sequence[str] | None = None,
    title: str = "Top terms",
    output_file: OutputFile = None,
    *,
    by: str = "probability",
    topic_names: Sequence[str] | None = None,
) -> "Figure":
    """Plot the top terms of each topic as bars, one small chart for each; of many topics the largest."""
    probabilities = as_matrix(F, "F")
    k, m = probabilities.shape
    fitted = getattr(F, "fit_", F)
    shares = fitted.topic_shares() if hasattr(fitted, "topic_shares") else np.full(k, 1 / k)
    names = term_names if term_names is not None else getattr(fitted, "terms", None)
    if names is not None and len(names) != m:
        raise InvalidValue(f"{len(names):,} term_names for {m:,} columns of F", key="term_names")
    shown = sorted(find_largest(shares, MAX_TERM_PLOTS).tolist())
    firsts = find_top_terms(probabilities, shares, n_top_terms, by)
    wide = min(4, len(shown))
    high = -(-len(shown) // wide)
    size = (max(4.0, 2.6 * wide), 0.7 + high * (0.55 + 0.19 * min(n_top_terms, m)))
    if len(shown) < k:
        title += f" of the {len(shown)} largest of {k} topics"
    with _open_figure(size, output_file) as figure:
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=11)
        charts = figure.subplots(high, wide, squeeze=False).ravel()
        for axes, topic in zip(charts, shown, strict=False):
            terms = firsts[topic]
            colour = PALETTE[topic % len(PALETTE)]
            axes.barh(np.arange(len(terms)), probabilities[topic, terms], color=colour, height=0.72)
            labels = [f"term {at}" if names is None else shorten_label(str(names[at])) for at in terms]
            axes.set_yticks(np.arange(len(terms)), labels, size=8, color=INK)
            axes.invert_yaxis()
            axes.set_title(_format_topic_name(topic, topic_names), size=9)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            axes.tick_params(axis="x", labelsize=7)
            axes.locator_params(axis="x", nbins=3)
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %" if value else "0")
        for axes in charts[len(shown) :]:
            axes.set_visible(False)
    return figure


@contextmanager
def _open_figure(size: tuple[float, float], output_file: OutputFile) -> Iterator[Any]:
    path = None if output_file is None else Path(output_file).expanduser()
    if path is not None and path.suffix.lower().removeprefix(".") not in FORMATS:
        message = f"output_file={str(path)!r}: give one of {', '.join('.' + f for f in FORMATS)}"
        raise InvalidValue(message, key="output_file")
    with use_plot_style(settings=PLOT_SETTINGS):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        if path is not None:
            write_figure(figure, path)


def _read_shares(L: Any) -> np.ndarray:
    shares = as_matrix(L, "L").astype(np.float32, copy=False)
    sums = shares.sum(axis=1)
    if not np.isfinite(shares).all() or shares.min() < 0 or sums.max() > 1.01:
        raise InvalidValue("a row of L is no mixture: give shares that are 0 or more and sum to one", key="L")
    return shares


def _merge_others(
    shares: np.ndarray, kept: np.ndarray, names: Sequence[str] | None
) -> tuple[np.ndarray, list[str], list[str]]:
    k = shares.shape[1]
    if names is not None and len(names) != k:
        raise InvalidValue(f"{len(names)} topic_names for {k} topics", key="topic_names")
    labels, colours = [_format_topic_name(int(at), names) for at in kept], list(PALETTE[: len(kept)])
    if len(kept) == k:
        return shares, labels, colours
    rest = np.maximum(shares.sum(axis=1) - shares[:, kept].sum(axis=1), 0)
    return np.column_stack([shares[:, kept], rest]), [*labels, f"{k - len(kept)} others"], [*colours, REST]


def _draw_topic_legend(figure: Any, labels: Sequence[str], colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(fc=colour, ec=colour, label=shorten_label(label)) for label, colour in zip(labels, colours, strict=True)
    ]
    figure.legend(handles=patches, loc="outside right upper", ncols=1 if len(labels) <= 16 else 2, handlelength=1.1)


def _format_topic_name(topic: int, names: Sequence[str] | None) -> str:
    return f"topic {topic}" if names is None else shorten_label(str(names[topic]), 2 * LONGEST_TERM)


def shorten_label(text: str, longest: int = LONGEST_TERM) -> str:
    text = to_one_line(text) or "(blank)"
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
