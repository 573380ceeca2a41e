"""Parquet files: documents as lists of terms and counts. One row group is in memory at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import open_parquet
from paceline.errors import UserError
from paceline.workloads.topics.counts.arrays import from_scipy
from paceline.workloads.topics.counts.blocks import Counts, Csr, DocumentBlock, Labelled, joined, no_rows, overlapping

INDICES, COUNTS = "indices", "counts"


def read_parquet(path: Path, fractional: bool = False) -> Counts:
    """Counts on disk: the list columns `indices` and `counts`."""
    groups, lengths, largest = [], [np.zeros(0, np.int64)], -1
    with open_parquet(path) as file:
        said = (file.schema_arrow.metadata or {}).get(b"terms")
        for number in range(file.metadata.num_row_groups):
            groups.append(file.metadata.row_group(number).num_rows)
            some, indices = flat(file.read_row_group(number, columns=[INDICES], use_threads=False).column(INDICES))
            lengths.append(some)
            if len(indices):
                largest = max(largest, int(indices.max()))
    terms = int(said) if said and said.isdigit() else largest + 1
    if not sum(groups) or largest < 0:
        raise UserError(f"{path}: is empty or all zero: {sum(groups):,} documents without a single count")
    vocabulary = path.with_name("terms.txt")
    if said is None and vocabulary.is_file():  # terms at the end of the vocabulary may occur nowhere
        with vocabulary.open("rb") as lines:
            terms = max(terms, sum(1 for _ in lines))
    if largest >= terms:
        raise UserError(f"{path}: the term {largest:,} is beyond the {terms:,} terms that the file says it has")
    return ParquetCounts(path, terms, tuple(groups), np.concatenate(lengths), fractional=fractional)


@dataclass(frozen=True, eq=False)
class ParquetCounts(Labelled):
    """Documents as rows of two list columns. The row group that was read last is kept."""

    path: Path
    terms: int
    groups: tuple[int, ...]  # rows of each
    lengths: np.ndarray
    kept: dict[int, Csr] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    sparse = True
    resident = False

    @property
    def documents(self) -> int:
        return sum(self.groups)

    @property
    def stored_bytes(self) -> int:
        return self.path.stat().st_size

    def weights(self) -> np.ndarray:
        return self.lengths

    def block(self, start: int, stop: int) -> DocumentBlock:
        if start >= stop:
            return no_rows(start, self.terms, sparse=True)
        parts = overlapping(self._first_rows, start, stop)
        return DocumentBlock(start, joined([self._group(number).between(*rows) for number, *rows in parts]))

    @cached_property
    def _first_rows(self) -> np.ndarray:
        return np.cumsum([0, *self.groups])

    def _group(self, number: int) -> Csr:
        with self.lock:
            if number not in self.kept:
                self.kept.clear()
                self.kept[number] = self._read(number)
            return self.kept[number]

    def _read(self, number: int) -> Csr:
        import scipy.sparse

        with open_parquet(self.path) as file:
            table = file.read_row_group(number, columns=[INDICES, COUNTS], use_threads=False)
        lengths, indices = flat(table.column(INDICES))
        others, data = flat(table.column(COUNTS))
        if not np.array_equal(lengths, others):
            row = int(self._first_rows[number]) + int((lengths != others).argmax())
            raise UserError(f"{self.path}: document {row} has not as many {COUNTS} as {INDICES}")
        if len(indices) and indices.min() < 0:
            raise UserError(f"{self.path}: row group {number} has a negative term; terms are numbered from 0")
        indptr = np.concatenate(([0], np.cumsum(lengths)))
        rows = scipy.sparse.csr_array((data, indices, indptr), shape=(len(lengths), self.terms))
        source = f"{self.path} row group {number}"
        return from_scipy(rows, fractional=self.fractional, source=source).values


def holds_counts(path: Path) -> bool:
    with open_parquet(path) as file:
        return {INDICES, COUNTS} <= set(file.schema_arrow.names)


def flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(length of each list, all of their numbers)."""
    import pyarrow
    import pyarrow.compute

    kinds = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    if not any(kind(column.type) for kind in kinds):
        raise UserError(f"the columns {INDICES!r} and {COUNTS!r} hold {column.type}; lists of numbers are needed")
    lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0).to_numpy()
    numbers = pyarrow.compute.list_flatten(column)
    if numbers.null_count:
        raise UserError(f"the columns {INDICES!r} and {COUNTS!r} must not hold null")
    return lengths.astype(np.int64), numbers.to_numpy()
