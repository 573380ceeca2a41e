"""Select rows of a table: folds, held-out rows, and rows that no member has learned from.

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
from paceline.data.order import derive_key, mix
from paceline.data.tables import TABLE_KINDS, format_label, iter_rows
from paceline.errors import UserError, did_you_mean, join_names
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

BLOCK = 2048
HELD_OUT, FOLD = 11, 12  # random streams
Row = dict[str, Any]


def find_table_kind(path: Path) -> str:
    """What kind of table a file is by its name; empty where it is none that has rows by name."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return TABLE_KINDS.get(name.suffix.lower(), "")


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some rows of a file, in its order."""

    file: Path
    numbers: np.ndarray  # of the file, rising
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
        for number, row in enumerate(iter_rows(self.file, find_table_kind(self.file))):
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
        kind = find_table_kind(self.file)
        file = folder / f"{name}.{kind}"
        {"parquet": _write_parquet, "jsonl": _write_jsonl}.get(kind, _write_csv)(file, self)
        return file

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(next(self.rows(), {}))

    def keys(self, columns: Sequence[str]) -> Iterator[int]:
        """A hash of what each row holds in these columns."""
        for row in self.rows():
            text = "\x1f".join(format_label(row.get(name)) for name in columns)
            yield int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def read_labelled_rows(path: Path, label: str, key: str) -> RowSet:
    """All rows of a table; UserError where it is no table, or a row has no label."""
    file = check_file(path, key)
    if not find_table_kind(file):
        raise UserError(f"{key}={file}: the name must end in one of {', '.join(TABLE_KINDS)}; .gz may follow")
    labels: list[str] = []
    for number, row in enumerate(iter_rows(file, find_table_kind(file)), 1):
        if label not in row:
            names = [str(name) for name in row]
            told = f"{did_you_mean(label, names)} (there: {join_names(names, 12)})"
            raise UserError(f"{file} row {number}: there is no column {label!r}{told}; type  data.label=COLUMN")
        labels.append(format_label(row[label]))
        if not labels[-1]:
            raise UserError(f"{file} row {number}: the label {label!r} is missing; leave such rows out")
    if not labels:
        raise UserError(f"{file}: there are no rows")
    return RowSet(file, np.arange(len(labels)), tuple(labels))


def split_held_out(rows: RowSet, fraction: float, seed: int) -> tuple[RowSet, RowSet]:
    """(the rest, rows to test on): by the number of a row and the seed alone."""
    chosen = _hash_rows(rows, seed, HELD_OUT) < np.uint64(fraction * (2**64 - 2**11))
    return rows.some(~chosen), rows.some(chosen)


def assign_folds(rows: RowSet, folds: int, seed: int) -> np.ndarray:
    """The fold of each row."""
    return (_hash_rows(rows, seed, FOLD) % np.uint64(folds)).astype(np.int64)


def _hash_rows(rows: RowSet, seed: int, purpose: int) -> np.ndarray:
    return mix(rows.numbers.astype(np.uint64) + derive_key(seed, purpose))


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


MOST_SEEN = 0.5  # else the table is rejected
INSTEAD = "give other rows as  data.path=FILE,  or have the members trained here:  model.members=[A.yaml,B.yaml]"


def find_test_table(runs: list[Path]) -> Path:
    """The one that all members were tested on, and none learned from."""
    found = {str(getattr(RunDir(run).recorded_spec().data, "test_path", None) or "") for run in runs}
    if len(found) != 1 or "" in found:
        raise UserError(
            "data.path is not given, and the runs have no data.test_path in common; name a table with rows that none "
            "of them learned from, as  data.path=FILE"
        )
    return Path(found.pop())


def drop_seen_rows(rows: RowSet, runs: list[Path], say: LogFn) -> RowSet:
    """The rows without those that some run learned from; UserError where these are most of them."""
    seen = np.zeros(len(rows), bool)
    for run in runs:
        table: Any = getattr(RunDir(run).recorded_spec().data, "path", None)
        if table is None or not find_table_kind(Path(table)) or not Path(table).is_file():
            say(f"  what {run} learned from is not a table that is still there: it is not checked for these rows")
            continue
        found = _find_rows_in(rows, Path(table))
        if found.mean() > MOST_SEEN:
            raise UserError(
                f"{found.sum():,} of the {len(rows):,} rows of {rows.file} are in {table}, which {run} learned from; "
                f"{INSTEAD}"
            )
        seen |= found
    if seen.any():
        say(f"  {seen.sum():,} of the {len(rows):,} rows are left out: members learned from the same")
    return rows.some(~seen)


def _find_rows_in(rows: RowSet, table: Path) -> np.ndarray:
    """Which rows hold what some row of the table holds, in all columns that both have."""
    if table.resolve() == rows.file.resolve():
        return np.ones(len(rows), bool)
    first: dict[str, Any] = next(iter_rows(table, find_table_kind(table)), {})
    columns = [name for name in rows.columns if name in first]
    if not columns:
        return np.zeros(len(rows), bool)
    other = RowSet(table, np.arange(_count_rows(table)), ())
    known = set(other.keys(columns))
    return np.array([key in known for key in rows.keys(columns)], bool)


def _count_rows(table: Path) -> int:
    return sum(1 for _ in iter_rows(table, find_table_kind(table)))
