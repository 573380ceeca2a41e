"""Plots of fitted trees in the run folder: importance of columns, and SHAP values.

They are drawn when a report first shows the run: SHAP values take longer than some runs.
"""

from collections.abc import Mapping
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.order import draw_fractions
from paceline.data.prepared_table import Task, find_cached_table
from paceline.errors import UserError
from paceline.reports.figures import COLOURS, FAINT, escape_mathtext, use_plot_style, write_png
from paceline.runlog.run_dir import RunDir
from paceline.workloads.trees.tree_model import FittedTrees

SHOWN_COLUMNS = 20
MIN_ROWS, MAX_ROWS = 32, 512
SHAP_WORK = 5e8  # leaves × levels² × rows: about two seconds of a core
ADDED = {
    Task.BINARY: "adds to the log-odds of {}",
    Task.CLASSES: "adds to the log-odds of a class, up or down, on average",
    Task.NUMBER: "adds to what is predicted",
    Task.COUNT: "adds to the logarithm of the count",
    Task.RANKING: "adds to the score",
}


def draw_tree_plots(folder: Path) -> None:
    """Draw the missing plots of a run; none where its trees cannot be read here."""
    pictures = RunDir(folder).pictures
    if pictures.is_symlink():
        return
    try:
        fitted = FittedTrees.read(folder)
        names = {kind: pictures / f"{kind}-{fitted.rounds:06d}.png" for kind in ("importance", "shap_values")}
        pictures.mkdir(exist_ok=True)
        if not names["importance"].exists():
            _draw_importance(fitted.importance(), names["importance"])
        if not names["shap_values"].exists() and (rows := _choose_rows(folder, fitted)) is not None:
            _draw_shap(fitted, rows, names["shap_values"])
    except (UserError, ImportError, ValueError, OSError):
        return


def _choose_rows(folder: Path, fitted: FittedTrees) -> np.ndarray | None:
    """Return some held-out (or else training) rows; None where the table is no longer cached."""
    data: Any = RunDir.open(folder).recorded_spec().data
    table = find_cached_table(data)
    if table is None or table.facts.columns != fitted.coding.columns:
        return None
    split = table.split("test" if table.facts.test_rows else "train")
    levels = 1 + log2(max(2.0, fitted.leaves / max(1, fitted.rounds)))
    count = int(np.clip(SHAP_WORK / (fitted.leaves * levels**2), MIN_ROWS, MAX_ROWS))
    return np.array(split.X[np.unique(np.linspace(0, len(split) - 1, count).astype(np.int64))])


@use_plot_style()
def _draw_importance(importance: Mapping[str, float], file: Path) -> None:
    shown = list(importance.items())[:SHOWN_COLUMNS][::-1]
    figure, axes = _make_figure(len(shown))
    axes.barh([escape_mathtext(name[:32]) for name, _ in shown], [100 * share for _, share in shown], color=COLOURS[0])
    axes.set_xlabel("% of what all splits gain")
    write_png(figure, file)


@use_plot_style()
def _draw_shap(fitted: FittedTrees, rows: np.ndarray, file: Path) -> None:
    values, names, task = fitted.contributions(rows), fitted.coding.columns, fitted.target.task
    sizes = np.abs(values).mean(axis=(0, 1))
    shown = np.argsort(-sizes, kind="stable")[:SHOWN_COLUMNS][::-1]
    figure, axes = _make_figure(len(shown))
    axes.set_yticks(range(len(shown)), [escape_mathtext(names[column][:32]) for column in shown])
    if task is Task.CLASSES:
        axes.barh(range(len(shown)), sizes[shown], color=COLOURS[0])
    else:
        axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
        for height, column in enumerate(shown):
            is_name = names[column] in fitted.coding.categories
            _draw_shap_row(axes, height, values[:, 0, column], None if is_name else rows[:, column])
        from matplotlib import colormaps

        low, high = (colormaps["coolwarm"](end) for end in (0.0, 1.0))
        for name, colour in {"low": low, "high": high, "missing, or a name": FAINT}.items():
            axes.scatter([], [], s=16, c=[colour], label=name)
        axes.legend(title="value", loc="lower right")
    axes.set_xlabel(ADDED[task].format(escape_mathtext(fitted.classes[-1]) if fitted.classes else ""))
    write_png(figure, file)


def _draw_shap_row(axes: Any, height: int, added: np.ndarray, given: np.ndarray | None) -> None:
    from matplotlib import colormaps

    up = height + 0.3 * (2 * draw_fractions(np.uint64(height), 0, len(added)) - 1)
    colours: Any = FAINT
    if given is not None:
        known = ~np.isnan(given)
        ranks = np.searchsorted(np.sort(given[known]), given) / max(1, known.sum() - 1)
        colours = np.where(known[:, None], colormaps["coolwarm"](np.clip(ranks, 0, 1)), (0.6, 0.6, 0.6, 1.0))
    axes.scatter(added, up, s=7, c=colours, linewidths=0)


def _make_figure(lines: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.8 + 0.26 * lines), layout="constrained")
    return figure, figure.subplots()
