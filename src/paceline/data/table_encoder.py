"""Encode the columns of a table as rows of numbers and write them: categories, labels, weights, queries."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.cache import ArrayWriter
from paceline.data.table_source import Block, Column, TableSource, Words
from paceline.data.tables import format_label
from paceline.errors import InvalidData, UserError, join_names

MAX_LABEL_VALUES = 1024
REMAPPED_ROWS = 1 << 16


class EncodedRows(NamedTuple):
    """Rows X, labels y, weights w, and the number of each row's query."""

    X: np.ndarray
    y: np.ndarray
    w: np.ndarray | None
    queries: np.ndarray | None

    def where(self, chosen: np.ndarray) -> "EncodedRows":
        return EncodedRows(*(None if part is None else part[chosen] for part in self))  # type: ignore[arg-type]


class SplitWriter:
    def __init__(self, folder: Path, name: str, encoder: "TableEncoder") -> None:
        self.folder, self.name, self.encoder = folder, name, encoder
        kinds = ["X", "y", *(["w"] if encoder.weight else []), *(["q"] if encoder.query else [])]
        numbers = {kind: np.dtype(np.int64 if kind == "q" else np.float32) for kind in kinds}
        self.writers = {kind: ArrayWriter(folder / f"{name}.{kind}.npy", numbers[kind]) for kind in kinds}
        self.last_query = -1
        self.labels: Counter[float] = Counter()
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
            begins = np.flatnonzero(np.diff(rows.queries, prepend=self.last_query))
            self.writers["q"].append(len(self) + begins)
            self.last_query = int(rows.queries[-1])
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
            self.many = len(self.labels) > MAX_LABEL_VALUES

    def close(self) -> None:
        """Close the files, and renumber categories alphabetically: they were numbered as they came."""
        for writer in self.writers.values():
            writer.__exit__(None)
        names, categories = self.encoder.names, self.encoder.categories
        orders = {number: self.encoder.order(name) for number, name in enumerate(names) if name in categories}
        _renumber(self.folder / f"{self.name}.X.npy", len(self), orders, len(names))
        if self.encoder.label_words:
            _renumber(self.folder / f"{self.name}.y.npy", len(self), {0: self.encoder.order(self.encoder.label)}, 1)

    def digest(self) -> str:
        return "".join(str(writer.facts["sha256"])[:16] for writer in self.writers.values())


def _renumber(file: Path, rows: int, orders: Mapping[int, np.ndarray], columns: int) -> None:
    """Change columns of a file in place, a few rows at a time: it may be larger than memory."""
    for first in range(0, rows if orders else 0, REMAPPED_ROWS):
        some = np.load(file, mmap_mode="r+").reshape(rows, columns)[first : first + REMAPPED_ROWS]
        for number, order in orders.items():
            codes = np.array(some[:, number])
            known = ~np.isnan(codes)
            codes[known] = order[codes[known].astype(np.int64)]
            some[:, number] = codes


class TableEncoder:
    """The columns of a table and what was learned of them. Categories are numbered as they come; `order` sorts."""

    def __init__(
        self, names: list[str], label: str, categories: list[str], weight: str | None = None, query: str | None = None
    ) -> None:
        self.names, self.label, self.categories, self.weight, self.query = names, label, categories, weight, query
        self.query_numbers: dict[str | float, int] = {}
        self.known: dict[str, dict[str, int]] = {}
        self.label_words = False
        self.testing = False

    def start_testing(self) -> None:
        """Treat new categories as missing from now on, and reject new classes."""
        self.testing = True
        self.query_numbers = {}

    def order(self, name: str) -> np.ndarray:
        words = list(self.known.get(name, {}))
        places = np.empty(len(words), np.float32)
        places[np.argsort(np.array(words, str), kind="stable")] = np.arange(len(words))
        return places

    def iter_encoded(self, source: TableSource) -> Iterator[EncodedRows]:
        """Yield the rows of each block of a table."""
        seen, name = 0, source.name
        for block in source.blocks():
            X, y = self.encode_features(name, block, seen), self._encode_labels(name, block[self.label], seen)
            queries = None if self.query is None else self._number_queries(name, block[self.query], seen)
            weights = None if self.weight is None else self._check_weights(name, block[self.weight])
            yield EncodedRows(X, y, weights, queries)
            seen += len(y)

    def _check_weights(self, source: str, weights: Column) -> np.ndarray:
        if isinstance(weights, Words) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise UserError(f"{source}: weights {self.weight!r} must be numbers of 0 or more", key="data.weight")
        return weights.astype(np.float32)

    def encode_features(self, source: str, block: Block, seen: int) -> np.ndarray:
        X = np.empty((len(next(iter(block.values()))), len(self.names)), np.float32)
        for number, name in enumerate(self.names):
            column = block[name]
            if name in self.categories:
                X[:, number] = self._encode_words(name, column)
                continue
            if isinstance(column, Words):
                raise InvalidData(f"{source}: {name!r} is not a number; type  data.ignore=[{name}]", key=name)
            if len(bad := np.flatnonzero(np.isinf(column))):
                raise InvalidData(f"{source} row {seen + bad[0] + 1}: {name!r} is infinite", key=name)
            X[:, number] = column
        return X

    def _encode_words(self, name: str, column: Column) -> np.ndarray:
        if not isinstance(column, Words):
            values, where = np.unique(column[~np.isnan(column)], return_inverse=True)
            codes = np.full(len(column), -1)
            codes[~np.isnan(column)] = where
            column = Words(codes, [*map(format_label, values)])
        known = self.known.setdefault(name, {})
        if not self.testing:
            for word in column.words:
                known.setdefault(word, len(known))
        places = np.array([*(known.get(word, np.nan) for word in column.words), np.nan], np.float32)
        return places[column.codes]

    def _encode_labels(self, source: str, column: Column, seen: int) -> np.ndarray:
        words = isinstance(column, Words)
        bad = np.flatnonzero(column.codes < 0 if isinstance(column, Words) else ~np.isfinite(column))
        if len(bad) or (self.label_words and not words):
            row = f" row {seen + bad[0] + 1}" if len(bad) else ""
            raise InvalidData(f"{source}{row}: the label {self.label!r} is missing", key="data.label")
        if not isinstance(column, Words):
            return column.astype(np.float32)
        self.label_words = True
        if self.testing and (new := [word for word in column.words if word not in self.known[self.label]]):
            raise UserError(f"{source}: {self.label!r} is {new[0]!r} in test rows alone", key="data.label")
        return self._encode_words(self.label, column)

    def _number_queries(self, source: str, column: Column, seen: int) -> np.ndarray:
        """Return the number of each row's query. The rows of a query must follow each other."""
        keys = column.codes if isinstance(column, Words) else column
        missing = np.flatnonzero(keys < 0 if isinstance(column, Words) else ~np.isfinite(keys))
        if len(missing):
            row = f"{source} row {seen + missing[0] + 1}"
            raise InvalidData(f"{row}: the query {self.query!r} is missing", key="data.query")
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        numbers, known = [], self.query_numbers
        for begin in begins:
            value = column.words[keys[begin]] if isinstance(column, Words) else float(keys[begin])
            numbers.append(known.setdefault(value, len(known)))
            if numbers[-1] < len(known) - 1:
                row, shown = f"{source} row {seen + begin + 1}", value if isinstance(value, str) else f"{value:g}"
                raise UserError(f"{row}: {self.query}={shown} came before; sort by {self.query!r}", key="data.query")
        return np.repeat(numbers, np.diff(np.append(begins, len(keys))))

    def facts(self, train: SplitWriter, test: SplitWriter) -> dict[str, Any]:
        classes = sorted(self.known[self.label]) if self.label_words else []
        labels = dict(train.labels)
        if self.label_words:
            order = self.order(self.label)
            labels = {float(order[int(code)]): weight for code, weight in labels.items()}
            if missing := [name for code, name in enumerate(classes) if code not in labels]:
                raise UserError(f"{self.label!r} is {join_names(missing)} in held-out rows alone", key="data.label")
        if not train.many and len(labels) == 1:
            raise UserError(f"data.label={self.label}: all rows have the same", key="data.label")
        if train.weight <= 0:
            raise UserError(f"data.weight={self.weight}: every weight is 0", key="data.weight")
        values = [] if train.many else sorted(labels)
        return {
            "columns": tuple(self.names),
            "categories": {name: sorted(self.known.get(name, {})) for name in self.categories},
            "classes": tuple(classes),
            "values": tuple(values),
            "rows": len(train),
            "test_rows": len(test),
            "totals": {
                "weights": [labels[value] for value in values],
                "mean": train.weighted / train.weight,
                "least": train.least,
            },
            "weighted": self.weight is not None,
            "queries": train.writers["q"].length if self.query else 0,
            "digest": train.digest() + test.digest(),
        }
