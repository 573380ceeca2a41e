"""Rows that are ranked within queries: which rows belong together, and how good an order is (NDCG)."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.trees.reading import Column, Words

FIRST = 10
"""Places that `ndcg_at_10` looks at."""
MOST_RELEVANT = 31
"""A label; the gain of a row is 2 to this power."""


class QueryNumbers:
    """Numbers the queries of a table as they come. The rows of one follow each other, so that a rank can have them."""

    def __init__(self) -> None:
        self.known: dict[str | float, int] = {}

    def of(self, where: str, name: str, column: Column, seen: int) -> np.ndarray:
        """Of each row of a block, of which `seen` rows came before."""
        keys = column.codes if isinstance(column, Words) else column
        missing = np.flatnonzero(keys < 0 if isinstance(column, Words) else ~np.isfinite(keys))
        if len(missing):
            raise UserError(f"{where} row {seen + missing[0] + 1}: the query {name!r} is missing; leave such rows out")
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        numbers = []
        for begin in begins:
            value = column.words[keys[begin]] if isinstance(column, Words) else float(keys[begin])
            number = self.known.setdefault(value, len(self.known))
            if number < len(self.known) - 1:
                shown = value if isinstance(value, str) else f"{value:g}"
                raise UserError(
                    f"{where} row {seen + begin + 1}: rows of {name}={shown} were there before, and others between; "
                    f"sort the table by {name!r}"
                )
            numbers.append(number)
        return np.repeat(numbers, np.diff(np.append(begins, len(keys))))


def ndcg_sums(scores: np.ndarray, labels: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    """Sums over the queries that begin at these rows; one without a relevant row counts as ranked perfectly, as
    XGBoost and LightGBM have it."""
    queries = np.searchsorted(starts, np.arange(len(labels)), side="right") - 1
    gains = 2.0 ** labels.astype(np.float64) - 1
    place = np.arange(len(labels)) - starts[queries]
    worth = 1 / np.log2(place + 2)
    by_score, by_gain = (gains[np.lexsort((-key, queries))] for key in (scores, gains))
    found = {"loss": np.zeros(len(starts)), "ndcg_at_10": np.zeros(len(starts))}
    for name, counted in (("loss", worth), ("ndcg_at_10", worth * (place < FIRST))):
        got, best = (np.bincount(queries, order * counted, len(starts)) for order in (by_score, by_gain))
        ndcg = np.divide(got, best, out=np.ones(len(starts)), where=best > 0)
        found[name] = 1 - ndcg if name == "loss" else ndcg
    return {**{name: float(value.sum()) for name, value in found.items()}, "weight": len(starts)}
