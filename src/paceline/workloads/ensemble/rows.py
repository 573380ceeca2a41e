"""Rows of a table of the user's: numbered, dealt out to folds by a hash of their number, written as tables again.

A member learns from a file that has nothing but the rows that it may see.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import check_file
from paceline.data.order import mix, stream
from paceline.data.table import KINDS, rows_of, word
from paceline.errors import UserError, did_you_mean, listed

BLOCK = 2048
HELD_OUT, FOLD = 11, 12
"""Streams of random numbers."""
Row = dict[str, Any]


def kind_of(path: Path) -> str:
    """What kind of table a file is by its name; empty where it is none that has rows by name."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return KINDS.get(name.suffix.lower(), "")


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some rows of a file, in its order."""

    file: Path
    numbers: np.ndarray
    """Which rows of the file, rising."""
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, chosen: np.ndarray) -> RowSet:
        """Those where it is true."""
        labels = tuple(label for label, taken in zip(self.labels, chosen, strict=True) if taken)
        return replace(self, numbers=self.numbers[chosen], labels=labels)

    def rows(self) -> Iterator[Row]:
        wanted = iter(self.numbers.tolist())
        due = next(wanted, None)
        for number, row in enumerate(rows_of(self.file, kind_of(self.file))):
            if number == due:
                yield row
                due = next(wanted, None)
            if due is None:
                return

    def blocks(self) -> Iterator[list[Row]]:
        some: list[Row] = []
        for row in self.rows():
            some.append(row)
            if len(some) == BLOCK:
                yield some
                some = []
        if some:
            yield some

    def write(self, folder: Path, name: str) -> Path:
        """As a table of the same kind, NAME and its suffix; not in one go, so the name is one that nobody reads."""
        folder.mkdir(parents=True, exist_ok=True)
        kind = kind_of(self.file)
        file = folder / f"{name}.{kind}"
        {"parquet": _write_parquet, "jsonl": _write_jsonl}.get(kind, _write_csv)(file, self)
        return file

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(next(self.rows(), {}))

    def keys(self, columns: Sequence[str]) -> Iterator[int]:
        """A hash of what each row holds in these columns."""
        for row in self.rows():
            text = "\x1f".join(word(row.get(name)) for name in columns)
            yield int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def read_rows(path: Path, label: str, key: str) -> RowSet:
    """All rows of a table; UserError where it is no table, or a row has no label."""
    file = check_file(path, key)
    if not kind_of(file):
        raise UserError(f"{key}={file}: the name must end in one of {', '.join(KINDS)}; .gz may follow")
    labels: list[str] = []
    for number, row in enumerate(rows_of(file, kind_of(file)), 1):
        if label not in row:
            names = [str(name) for name in row]
            told = f"{did_you_mean(label, names)} (there: {listed(names, 12)})"
            raise UserError(f"{file} row {number}: there is no column {label!r}{told}; type  data.label=COLUMN")
        labels.append(word(row[label]))
        if not labels[-1]:
            raise UserError(f"{file} row {number}: the label {label!r} is missing; leave such rows out")
    if not labels:
        raise UserError(f"{file}: there are no rows")
    return RowSet(file, np.arange(len(labels)), tuple(labels))


def held_out(rows: RowSet, fraction: float, seed: int) -> tuple[RowSet, RowSet]:
    """(the rest, rows to test on): by the number of a row and the seed alone."""
    chosen = _hashes(rows, seed, HELD_OUT) < np.uint64(fraction * (2**64 - 2**11))
    return rows.some(~chosen), rows.some(chosen)


def folds_of(rows: RowSet, folds: int, seed: int) -> np.ndarray:
    """The fold of each row."""
    return (_hashes(rows, seed, FOLD) % np.uint64(folds)).astype(np.int64)


def _hashes(rows: RowSet, seed: int, purpose: int) -> np.ndarray:
    return mix(rows.numbers.astype(np.uint64) + stream(seed, purpose))


def _write_csv(file: Path, rows: RowSet) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows.columns), delimiter="\t" if file.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows.rows())


def _write_jsonl(file: Path, rows: RowSet) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.rows())


def _write_parquet(file: Path, rows: RowSet) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(rows.file)
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for block in rows.blocks():
            writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))
