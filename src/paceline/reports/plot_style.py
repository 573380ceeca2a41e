"""How every figure looks: formats, colours and the settings of matplotlib."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.io.escape import escape_hidden
from paceline.io.files import write_atomic

FORMATS = ("png", "pdf", "svg")
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d")
INK, FAINT = "#1f2937", "#6b7280"
STYLE_FILE = Path(__file__).parent / "assets" / "paceline.mplstyle"
PROCESS_SETTINGS = ("backend", "interactive", "toolbar", "webagg", "timezone", "tk.", "docstring", "date.", "figure.m")
NO_SETTINGS: Mapping[Any, Any] = MappingProxyType({})


@contextmanager
def use_plot_style(style: Path | None = STYLE_FILE, settings: Mapping[Any, Any] = NO_SETTINGS) -> Iterator[None]:
    """Draw with matplotlib's own defaults, this style and these settings.

    The user's matplotlibrc is ignored: matplotlib reads that of the current folder first, which may be a run from
    elsewhere, and it can call LaTeX with any text.
    """
    log = logging.getLogger("matplotlib")
    before = log.level
    log.setLevel(logging.ERROR)  # it would print lines of that file as they are
    try:
        import matplotlib
    finally:
        log.setLevel(before)
    plain: dict[Any, Any] = {
        key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith(PROCESS_SETTINGS)
    }
    chosen: Any = matplotlib.rc_params_from_file(style, use_default_template=False) if style is not None else {}
    with matplotlib.rc_context({**plain, **chosen, **settings}):
        yield


def write_png(figure: Any, file: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, content.getvalue())


def escape_mathtext(value: Any) -> Any:
    """Return all texts of a chart with hidden characters escaped, and dollars that start no formula."""
    if isinstance(value, str):
        return escape_hidden(value).replace("$", r"\$")
    if isinstance(value, dict):
        return {key: escape_mathtext(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | dict):
        return [escape_mathtext(inner) for inner in value]
    return value
