"""How every figure looks: formats, colours and the settings of matplotlib."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.io.escape import escape_hidden
from paceline.io.safe_open import read_text

FORMATS = ("png", "pdf", "svg")
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d")
INK, FAINT = "#1f2937", "#6b7280"
PLOT_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.hashsalt": "paceline",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "path.simplify_threshold": 0.5,
}

SETTINGS = Path("matplotlibrc")
OF_NO_FIGURE = ("backend", "interactive", "toolbar", "webagg", "timezone", "tk.", "docstring", "date.epoch", "figure.m")
"""How the names of settings begin that change the process, and no figure."""


@contextmanager
def use_plot_style(style: Mapping[Any, Any] = PLOT_STYLE) -> Iterator[None]:
    """What is drawn within has matplotlib's own defaults and this style.

    A matplotlibrc has no say. matplotlib reads that of the current folder first, which may be a run from elsewhere, and
    it can have LaTeX called, with any text.
    """
    _check_matplotlibrc()
    log = logging.getLogger("matplotlib")
    before = log.level
    log.setLevel(logging.ERROR)  # what is wrong there is printed as it stands
    try:
        import matplotlib
    finally:
        log.setLevel(before)
    plain = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith(OF_NO_FIGURE)}
    with matplotlib.rc_context({**plain, **style}):
        yield


def _check_matplotlibrc() -> None:
    """That matplotlib can read the file which it looks for in the current folder, whatever stands in it."""
    try:
        if SETTINGS.exists() and not SETTINGS.is_dir():
            read_text(SETTINGS, 1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{SETTINGS.absolute()}, which matplotlib reads, cannot be read: {why}; move it away") from None


def escape_mathtext(value: Any) -> Any:
    """A text from a file, or all texts of a chart, for matplotlib: all is seen, and a dollar begins no formula."""
    if isinstance(value, str):
        return escape_hidden(value).replace("$", r"\$")
    if isinstance(value, dict):
        return {key: escape_mathtext(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | dict):
        return [escape_mathtext(inner) for inner in value]
    return value
