"""Encode the columns of a table as rows of numbers and write them: categories, labels, weights, queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.cache import ArrayWriter
from paceline.errors import UserError, join_names
from paceline.workloads.trees.table_source import Block, Column, Words

FEW_VALUES = 1024
"""Different numbers of a label that are remembered."""
REMAPPED_ROWS = 1 << 16


class EncodedRows(NamedTuple):
    """Some rows of a table, as they are written."""

    X: np.ndarray
    y: np.ndarray
    w: np.ndarray | None
    queries: np.ndarray | None
    """The number of each row's query."""

    def where(self, chosen: np.ndarray) -> EncodedRows:
        return EncodedRows(*(None if part is None else part[chosen] for part in self))  # type: ignore[arg-type]


class SplitWriter:
    """Rows of a split, written block by block."""

    def __init__(self, folder: Path, name: str, columns: TableEncoder) -> None:
        self.folder, self.name, self.columns = folder, name, columns
        kinds = ["X", "y", *(["w"] if columns.weight else []), *(["q"] if columns.query else [])]
        numbers = {kind: np.dtype(np.int64 if kind == "q" else np.float32) for kind in kinds}
        self.writers = {kind: ArrayWriter(folder / f"{name}.{kind}.npy", numbers[kind]) for kind in kinds}
        self.query = -1
        """Of the last row."""
        self.labels: Counter[float] = Counter()
        """Weights by label, as long as there are few different ones."""
        self.many = False
        self.weight = self.weighted = 0.0
        self.least = np.inf

    def __len__(self) -> int:
        return self.writers["y"].length

    def add(self, rows: EncodedRows) -> None:
        y, w = rows.y, rows.w
        if not len(y):
            return
        if rows.queries is not None:
            begins = np.flatnonzero(np.diff(rows.queries, prepend=self.query))
            self.writers["q"].append(len(self) + begins)
            self.query = int(rows.queries[-1])
        for kind, values in (("X", rows.X.ravel()), ("y", y), ("w", w)):
            if values is not None:
                self.writers[kind].append(values)
        weights = np.ones(len(y)) if w is None else w
        self.weight += float(weights.sum())
        self.weighted += float((weights * y).sum())
        self.least = min(self.least, float(y.min()))
        if not self.many:
            values = np.unique(y)
            sums = np.bincount(np.searchsorted(values, y), weights)
            self.labels.update(dict(zip(values.tolist(), sums.tolist(), strict=True)))
            self.many = len(self.labels) > FEW_VALUES

    def close(self) -> None:
        """Numbers of names become those of the alphabetical order."""
        for writer in self.writers.values():
            writer.__exit__(None)
        names, categories = self.columns.names, self.columns.categories
        orders = {number: self.columns.order(name) for number, name in enumerate(names) if name in categories}
        _remap(self.folder / f"{self.name}.X.npy", len(self), orders, len(names))
        if self.columns.label_words:
            _remap(self.folder / f"{self.name}.y.npy", len(self), {0: self.columns.order(self.columns.label)}, 1)

    def digest(self) -> str:
        return "".join(str(writer.facts["sha256"])[:16] for writer in self.writers.values())


def _remap(file: Path, rows: int, orders: Mapping[int, np.ndarray], columns: int) -> None:
    """In place, mapped a few rows at a time: the file may be larger than memory."""
    for first in range(0, rows if orders else 0, REMAPPED_ROWS):
        some = np.load(file, mmap_mode="r+").reshape(rows, columns)[first : first + REMAPPED_ROWS]
        for number, order in orders.items():
            codes = np.array(some[:, number])
            there = ~np.isnan(codes)
            codes[there] = order[codes[there].astype(np.int64)]
            some[:, number] = codes


class TableEncoder:
    """The columns of a table and what was learned of them so far. Names are numbered as they come; `order` sorts."""

    def __init__(
        self, names: list[str], label: str, categories: list[str], weight: str | None = None, query: str | None = None
    ) -> None:
        self.names, self.label, self.categories, self.weight, self.query = names, label, categories, weight, query
        self.queries = QueryEncoder()
        self.known: dict[str, dict[str, int]] = {}
        self.label_words = False
        self.testing = False

    @property
    def needed(self) -> list[str]:
        return [*self.names, self.label, *filter(None, (self.weight, self.query))]

    def learned(self) -> None:
        """What comes now is tested on: a name that was not seen is missing, a class that was not seen is refused."""
        self.testing = True
        self.queries = QueryEncoder()

    def order(self, name: str) -> np.ndarray:
        """The place of each number in the alphabetical order of its names."""
        words = list(self.known.get(name, {}))
        places = np.empty(len(words), np.float32)
        places[np.argsort(np.array(words, str), kind="stable")] = np.arange(len(words))
        return places

    def rows(self, where: str, block: Block, seen: int) -> EncodedRows:
        """Those of a block, of which `seen` rows came before."""
        X, y = self.matrix(where, block, seen), self._labels(where, block[self.label], seen)
        queries = None if self.query is None else self.queries.of(where, self.query, block[self.query], seen)
        return EncodedRows(X, y, None if self.weight is None else self._weights(where, block[self.weight]), queries)

    def _weights(self, where: str, weights: Column) -> np.ndarray:
        if isinstance(weights, Words) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise UserError(f"{where}: column {self.weight!r} must hold numbers of 0 or more, to be weights")
        return weights.astype(np.float32)

    def matrix(self, where: str, block: Block, seen: int) -> np.ndarray:
        X = np.empty((len(next(iter(block.values()))), len(self.names)), np.float32)
        for number, name in enumerate(self.names):
            column = block[name]
            if name in self.categories:
                X[:, number] = self._codes(name, column)
            elif isinstance(column, Words):
                raise UserError(
                    f"{where}: {name!r} holds words; type  data.categories=[{name}]  or  data.ignore=[{name}]"
                )
            else:
                if len(bad := np.flatnonzero(np.isinf(column))):
                    raise UserError(
                        f"{where} row {seen + bad[0] + 1}: {name!r} is infinite; write nothing there if it is not known"
                    )
                X[:, number] = column
        return X

    def _codes(self, name: str, column: Column) -> np.ndarray:
        if not isinstance(column, Words):
            values, where = np.unique(column[~np.isnan(column)], return_inverse=True)
            codes = np.full(len(column), -1)
            codes[~np.isnan(column)] = where
            column = Words(codes, [f"{value:g}" for value in values])
        known = self.known.setdefault(name, {})
        if not self.testing:
            for word in column.words:
                known.setdefault(word, len(known))
        places = np.array([*(known.get(word, np.nan) for word in column.words), np.nan], np.float32)
        return places[column.codes]

    def _labels(self, where: str, column: Column, seen: int) -> np.ndarray:
        if not isinstance(column, Words):
            if self.label_words or len(bad := np.flatnonzero(~np.isfinite(column))):
                row = "" if self.label_words else f" row {seen + bad[0] + 1}"
                raise UserError(f"{where}{row}: the label {self.label!r} is missing or not finite; leave such rows out")
            return column.astype(np.float32)
        self.label_words = True
        if len(bad := np.flatnonzero(column.codes < 0)):
            raise UserError(
                f"{where} row {seen + bad[0] + 1}: the label {self.label!r} is missing; leave such rows out"
            )
        if self.testing and (new := [word for word in column.words if word not in self.known[self.label]]):
            raise UserError(
                f"{where}: {self.label!r} is {new[0]!r} there, which no row to learn from has; add rows of it, or "
                "leave it out"
            )
        return self._codes(self.label, column)

    def facts(self, train: SplitWriter, test: SplitWriter) -> dict[str, Any]:
        """Those of the whole table, as `TableFacts` has them."""
        classes = sorted(self.known[self.label]) if self.label_words else []
        labels = dict(train.labels)
        if self.label_words:
            order = self.order(self.label)
            labels = {float(order[int(code)]): weight for code, weight in labels.items()}
            if len(missing := [name for code, name in enumerate(classes) if code not in labels]):
                raise UserError(
                    f"{self.label!r} is {join_names(missing)} in held-out rows alone; add rows, or leave it out"
                )
        if not train.many and len(labels) == 1:
            only = classes[0] if classes else f"{next(iter(labels)):g}"
            raise UserError(f"data.label={self.label}: every row has {only}; there is nothing to learn")
        if train.weight <= 0:
            raise UserError(f"data.weight={self.weight}: every weight is 0; there is nothing to learn from")
        values = [] if train.many else sorted(labels)
        weights = [labels[value] for value in values]
        mean = train.weighted / train.weight
        return {
            "columns": tuple(self.names),
            "categories": {name: sorted(self.known.get(name, {})) for name in self.categories},
            "classes": tuple(classes),
            "values": tuple(values),
            "rows": len(train),
            "test_rows": len(test),
            "totals": {"weights": weights, "mean": mean, "least": train.least},
            "weighted": self.weight is not None,
            "queries": train.writers["q"].length if self.query else 0,
            "digest": train.digest() + test.digest(),
        }


FIRST = 10
"""Places that `ndcg_at_10` looks at."""
MOST_RELEVANT = 31
"""A label; the gain of a row is 2 to this power."""


class QueryEncoder:
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


def sum_ndcg(scores: np.ndarray, labels: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
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
