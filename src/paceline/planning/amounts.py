"""Amounts of a plan as people read them, in few columns."""

from __future__ import annotations

from paceline.record.units import number


def short(seconds: float) -> str:
    """A duration in few columns: 12.3 ms, 1.82 s, 23.9 min, 3.1 h."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= scale * (1 if unit == "s" else 1.5):
            return f"{number(seconds / scale, 3)} {unit}"
    return f"{number(seconds * 1e3, 3)} ms"


def multiple(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×" if ratio < 99.95 else f"{ratio:,.0f}×"


def ratio(value: float) -> str:
    return "-" if value == float("inf") else f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def amount(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.095 else f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"
