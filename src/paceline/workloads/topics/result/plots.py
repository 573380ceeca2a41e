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
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")  # beyond the palette
COLUMNS = 1600  # of the structure plot: more documents are averaged
GAP = 0.012  # between groups, of the width
MAX_TERM_PLOTS = 24
LONGEST_TERM = 22
PLOT_SETTINGS = {"text.parse_math": False, "hatch.linewidth": 0.6}
OutputFile = str | Path | None


def plot_loss(losses: Any, title: str = "Loss", output_file: OutputFile = None) -> "Figure":
    """Plot the loss after each pass, and below it the distance to the lowest, on a logarithmic scale."""
    values = np.asarray([float(v) for v in getattr(losses, "losses", losses)])
    if not values.size:
        raise InvalidValue("there are no losses to plot", key="losses")
    with _open_figure((6.4, 4.6), output_file) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        passes = np.arange(1, len(values) + 1)
        mark = "o" if len(values) < 30 else None
        upper.plot(passes, values, color=PALETTE[0], marker=mark, markersize=3)
        upper.set(title=title, ylabel="loss")
        upper.yaxis.set_major_formatter(_make_plain_formatter())
        low, high = np.nanmin(values), np.nanmax(values[min(len(values) - 1, len(values) // 20) :])
        if high > low:  # the fall of the first passes would flatten all that follows
            upper.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        above = values[:-1] - np.nanmin(values)
        seen = above > 0
        if seen.any():
            lower.plot(passes[:-1][seen], above[seen], color=PALETTE[1], marker=mark, markersize=3)
            lower.set_yscale("log")
            lower.yaxis.set_major_formatter(_make_plain_formatter())
            lower.yaxis.set_minor_formatter("")
        lower.set(ylabel="above the lowest", xlabel="pass")
        lower.xaxis.get_major_locator().set_params(integer=True)
    return figure


def plot_structure(
    L: Any,
    normalize_rows: bool = False,
    title: str = "Structure of the documents",
    output_file: OutputFile = None,
    *,
    groups: Sequence[Any] | None = None,
    order: Sequence[int] | np.ndarray | None = None,
    topic_names: Sequence[str] | None = None,
    most_topics: int = len(PALETTE),
) -> "Figure":
    """Plot every document as a stacked bar of its topics, like ones side by side.

    `groups`: a label for each document, drawn apart. `order`: instead of `sort_documents`. The smallest of more than
    `most_topics` are drawn as one, in grey.
    """
    if most_topics < 1:
        raise InvalidValue(f"most_topics={most_topics}: give at least 1", key="most_topics")
    shares = _read_shares(L, normalize_rows)
    documents = len(shares)
    kept = np.sort(find_largest(shares.mean(axis=0, dtype=np.float64), most_topics))
    stacked, labels, colours = _merge_others(shares, kept, topic_names)
    parts = _split_groups(shares, kept, groups, order)
    with _open_figure((9.0, 3.9), output_file) as figure:
        axes = figure.add_subplot()
        gap = GAP * documents if len(parts) > 1 else 0.0
        left, middles = 0.0, []
        for _, members in parts:
            columns = average_neighbours(stacked, members, max(1, round(COLUMNS * len(members) / documents)))
            edges = np.linspace(left, left + len(members), len(columns) + 1)
            _draw_stacked_bars(axes, edges, columns, colours)
            middles.append(left + len(members) / 2)
            left += len(members) + gap
        axes.set(xlim=(0, max(left - gap, 1e-9)), ylim=(0, 1), title=title, ylabel="share of the document")
        axes.grid(visible=False)
        axes.set_xticks(middles if groups is not None else [])
        axes.set_xlabel(f"{documents:,} documents" + (f" in {len(parts)} groups" if groups is not None else ""))
        if groups is not None:
            _label_groups(axes, [name for name, _ in parts], [len(members) / documents for _, members in parts])
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
    topics: Sequence[int] | None = None,
    topic_names: Sequence[str] | None = None,
) -> "Figure":
    """Plot the top terms of each topic as bars, one small chart for each; by default the largest of many topics."""
    probabilities = as_matrix(F, "F")
    k, m = probabilities.shape
    fitted = getattr(F, "fit_", F)
    shares = fitted.topic_shares() if hasattr(fitted, "topic_shares") else np.full(k, 1 / k)
    names = term_names if term_names is not None else getattr(fitted, "terms", None)
    if names is not None and len(names) != m:
        raise InvalidValue(f"{len(names):,} term_names for {m:,} columns of F", key="term_names")
    shown = _choose_shown_topics(k, shares, topics)
    firsts = find_top_terms(probabilities, shares, n_top_terms, by)
    wide = min(4, len(shown))
    high = -(-len(shown) // wide)
    size = (max(4.0, 2.6 * wide), 0.7 + high * (0.55 + 0.19 * min(n_top_terms, m)))
    if len(shown) < k:
        title += f" of the {len(shown)} {'chosen' if topics is not None else 'largest'} of {k} topics"
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


def _read_shares(L: Any, normalize_rows: bool) -> np.ndarray:
    shares = as_matrix(L, "L").astype(np.float32, copy=False)
    if not np.isfinite(shares).all() or shares.min() < 0:
        raise InvalidValue("L has numbers below zero or not finite: give shares", key="L")
    sums = shares.sum(axis=1, keepdims=True)
    if normalize_rows:
        return shares / np.maximum(sums, 1e-30)
    if sums.max() > 1.01:
        message = f"a row of L sums to {sums.max():.4g}, not to one; pass  normalize_rows=True"
        raise InvalidValue(message, key="normalize_rows")
    return shares


def _merge_others(
    shares: np.ndarray, kept: np.ndarray, names: Sequence[str] | None
) -> tuple[np.ndarray, list[str], list[tuple[str, str]]]:
    k = shares.shape[1]
    if names is not None and len(names) != k:
        raise InvalidValue(f"{len(names)} topic_names for {k} topics", key="topic_names")
    labels, many = [_format_topic_name(int(at), names) for at in kept], len(PALETTE)
    looks = [(PALETTE[place % many], HATCHES[place // many % len(HATCHES)]) for place in range(len(kept))]
    if len(kept) == k:
        return shares, labels, looks
    rest = np.maximum(shares.sum(axis=1) - shares[:, kept].sum(axis=1), 0)
    return np.column_stack([shares[:, kept], rest]), [*labels, f"{k - len(kept)} others"], [*looks, (REST, "")]


def _split_groups(
    shares: np.ndarray, kept: np.ndarray, groups: Sequence[Any] | None, order: Sequence[int] | np.ndarray | None
) -> list[tuple[str, np.ndarray]]:
    documents = len(shares)
    placed = sort_documents(shares) if order is None else np.asarray(order)
    if order is None:  # documents of topics that are not drawn on their own come last
        placed = placed[np.argsort(~np.isin(shares.argmax(axis=1)[placed], kept), kind="stable")]
    elif not np.array_equal(np.sort(placed), np.arange(documents)):
        raise InvalidValue(f"order: give each of the {documents:,} documents once", key="order")
    if groups is None:
        return [("", placed)]
    if len(groups) != documents:
        raise InvalidValue(f"{len(groups):,} groups for {documents:,} documents", key="groups")
    labels = np.array([str(label) for label in groups])
    names, of = np.unique(labels, return_inverse=True)
    in_order = placed[np.argsort(of[placed], kind="stable")]
    ends = np.cumsum(np.bincount(of))
    return [(str(name), part) for name, part in zip(names, np.split(in_order, ends[:-1]), strict=True)]


def _draw_stacked_bars(axes: Any, edges: np.ndarray, columns: np.ndarray, colours: Sequence[tuple[str, str]]) -> None:
    xs = np.repeat(edges, 2)[1:-1]
    below = np.zeros(len(columns), np.float32)
    for place, (colour, hatch) in enumerate(colours):
        above = below + columns[:, place]
        axes.fill_between(
            xs, np.repeat(below, 2), np.repeat(above, 2), facecolor=colour, edgecolor="#ffffff" if hatch else colour,
            hatch=hatch or None, linewidth=0 if hatch else 0.15, rasterized=False,
        )  # fmt: skip
        below = above


def _label_groups(axes: Any, names: Sequence[str], shares: Sequence[float]) -> None:
    tight = any(len(name) > 110 * share for name, share in zip(names, shares, strict=True))
    axes.set_xticklabels([shorten_label(name) for name in names], size=8, color=INK)
    axes.tick_params(axis="x", length=0, rotation=40 if tight else 0)
    if tight:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _draw_topic_legend(figure: Any, labels: Sequence[str], colours: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(fc=colour, hatch=hatch or None, ec="#ffffff" if hatch else colour, label=shorten_label(label))
        for label, (colour, hatch) in zip(labels, colours, strict=True)
    ]
    figure.legend(handles=patches, loc="outside right upper", ncols=1 if len(labels) <= 16 else 2, handlelength=1.1)


def _choose_shown_topics(k: int, shares: np.ndarray, topics: Sequence[int] | None) -> list[int]:
    if topics is None:
        return list(range(k)) if k <= MAX_TERM_PLOTS else sorted(find_largest(shares, MAX_TERM_PLOTS).tolist())
    wrong = [topic for topic in topics if not 0 <= topic < k]
    if wrong or not len(topics):
        raise InvalidValue(f"topics={list(topics)}: give some of 0 to {k - 1}", key="topics")
    return [int(topic) for topic in topics]


def _format_topic_name(topic: int, names: Sequence[str] | None) -> str:
    return f"topic {topic}" if names is None else shorten_label(str(names[topic]), 2 * LONGEST_TERM)


def shorten_label(text: str, longest: int = LONGEST_TERM) -> str:
    text = to_one_line(text) or "(blank)"
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _make_plain_formatter() -> Any:
    """Return a formatter of plain numbers: mathtext is off, since terms may contain its characters."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-3 <= abs(value) < 1e10 else f"{value:.6g}")
