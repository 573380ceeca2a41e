"""How every figure looks: formats, colours and the settings of matplotlib."""

from __future__ import annotations

from typing import Any

from paceline.signs import visible

FORMATS = ("png", "pdf", "svg")
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d")
INK, FAINT = "#1f2937", "#6b7280"
STYLE: dict[Any, Any] = {
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


def literal(value: Any) -> Any:
    """A text from a file, or all texts of a chart, for matplotlib: all is seen, and a dollar begins no formula."""
    if isinstance(value, str):
        return visible(value).replace("$", r"\$")
    if isinstance(value, dict):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | dict):
        return [literal(inner) for inner in value]
    return value
