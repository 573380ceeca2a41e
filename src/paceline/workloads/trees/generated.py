"""A table that is made up: numbers, names and gaps, and a label that depends on some of them. Row i is always row i."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.data.order import fractions, stream

COLOURS = ("amber", "blue", "green", "red", "violet")
GAPS = 0.05
"""Of the values of one column that are missing."""
BLOCK = 1 << 16
LABEL, CATEGORY = "label", "colour"


def names(columns: int) -> list[str]:
    return [CATEGORY, *(f"x{number}" for number in range(1, columns))]


def blocks(rows: int, columns: int) -> Iterator[dict[str, np.ndarray]]:
    """The table block by block, each column by its name."""
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        drawn = {name: fractions(stream(number), first, count) for number, name in enumerate(names(columns))}
        colour = (drawn[CATEGORY] * len(COLOURS)).astype(np.int64)
        x1, x2, x3 = (drawn[f"x{number}"] for number in (1, 2, 3))
        odds = 6 * (x1 - 0.5) * (colour != 1) + 4 * np.sin(6 * x2) + 3 * (x3 > 0.7) * (colour == 3) - 1
        found: dict[str, np.ndarray] = {name: drawn[name].astype(np.float32) for name in names(columns)}
        found["x2"][fractions(stream(-1), first, count) < GAPS] = np.nan
        found[CATEGORY] = np.array(COLOURS)[colour]
        found[LABEL] = np.array(["no", "yes"])[(fractions(stream(-2), first, count) < 1 / (1 + np.exp(-odds))) * 1]
        yield found
