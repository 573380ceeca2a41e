"""Plots of fitted trees in the run folder: importance of columns, and SHAP values.

They are drawn when a report first shows the run: SHAP values take longer than some runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.prepared_table import find_cached_table
from paceline.errors import UserError
from paceline.reports.figures import COLOURS, escape_mathtext, use_plot_style, write_png
from paceline.runlog.run_dir import RunDir
from paceline.workloads.trees.tree_model import FittedTrees

SHOWN_COLUMNS = 20
MIN_ROWS, MAX_ROWS = 32, 512
SHAP_WORK = 2.5e9  # bytes of the model × rows: about two seconds of a core, for trees of six levels


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
            gains = {name: 100 * share for name, share in fitted.importance().items()}
            _draw_bars(gains, "% of what all splits gain", names["importance"])
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
    count = int(np.clip(SHAP_WORK / len(fitted.raw), MIN_ROWS, MAX_ROWS))
    return np.array(split.X[np.unique(np.linspace(0, len(split) - 1, count).astype(np.int64))])


def _draw_shap(fitted: FittedTrees, rows: np.ndarray, file: Path) -> None:
    """Draw the mean size of the SHAP values of each column."""
    sizes = np.abs(fitted.contributions(rows)).mean(axis=(0, 1))
    order = np.argsort(-sizes, kind="stable")
    ordered = {fitted.coding.columns[column]: float(sizes[column]) for column in order}
    what = "log-odds" if fitted.classes else "the score of a row"
    _draw_bars(ordered, f"adds to {what}, up or down, on average", file)


@use_plot_style()
def _draw_bars(values: Mapping[str, float], label: str, file: Path) -> None:
    """Draw the first columns, those of the largest values."""
    from matplotlib.figure import Figure

    shown = list(values.items())[:SHOWN_COLUMNS][::-1]
    figure = Figure(figsize=(6, 0.8 + 0.26 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.barh([escape_mathtext(name[:32]) for name, _ in shown], [value for _, value in shown], color=COLOURS[0])
    axes.set_xlabel(label)
    write_png(figure, file)
