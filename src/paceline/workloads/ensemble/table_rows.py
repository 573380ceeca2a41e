"""Select rows of a table: folds, held-out rows, and rows that no member has learned from.

A member learns from a file that has nothing but the rows that it may see.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import invalid_data
from paceline.data.order import derive_key, mix
from paceline.data.tables import check_columns, check_table, format_label, iter_rows, table_kind
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

BLOCK = 2048
HELD_OUT_ROWS, FOLD = 11, 12  # random streams
MAX_SEEN = 0.5  # else the table is rejected
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class RowSet:
    file: Path
    numbers: np.ndarray  # of the file, rising
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, chosen: np.ndarray) -> "RowSet":
        return replace(self, numbers=self.numbers[chosen], labels=tuple(compress(self.labels, chosen)))

    def rows(self) -> Iterator[Row]:
        wanted = np.zeros(self.numbers.max(initial=-1) + 1, bool)
        wanted[self.numbers] = True
        return compress(iter_rows(self.file, table_kind(self.file)), wanted)

    def blocks(self) -> Iterator[list[Row]]:
        rows = self.rows()
        while block := list(islice(rows, BLOCK)):
            yield block

    def write_once(self, folder: Path, name: str) -> Path:
        kind = table_kind(self.file)
        file = folder / f"{name}.{kind}"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"writing-{name}.{kind}"
            self._write_rows(part, kind)
            part.rename(file)
        return file

    def _write_rows(self, file: Path, kind: str) -> None:
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            schema = pyarrow.parquet.read_schema(self.file)
            with pyarrow.parquet.ParquetWriter(file, schema) as parquet:
                for block in self.blocks():
                    parquet.write_table(pyarrow.Table.from_pylist(block, schema=schema))
            return
        with file.open("w", encoding="utf-8", newline="") as out:
            if kind == "jsonl":
                out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())
            else:
                writer = csv.DictWriter(out, list(self.columns), delimiter="\t" if kind == "tsv" else ",")
                writer.writeheader()
                writer.writerows(self.rows())

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(next(self.rows(), {}))


def read_labelled_rows(path: Path, label: str, key: str) -> RowSet:
    file, kind = check_table(path, key)
    labels: list[str] = []
    for number, row in enumerate(iter_rows(file, kind), 1):
        check_columns({"data.label": label}, row, f"{file} row {number}")
        labels.append(format_label(row[label]))
        if not labels[-1]:
            raise invalid_data(f"{file} row {number}: the label {label!r} is missing; leave such rows out")
    if not labels:
        raise invalid_data(f"{file}: there are no rows")
    return RowSet(file, np.arange(len(labels)), tuple(labels))


def assign_folds(rows: RowSet, folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, drawn by its number in the file."""
    hashed = mix(rows.numbers.astype(np.uint64) + derive_key(seed, FOLD))
    return (hashed % np.uint64(folds)).astype(np.int64)


def drop_seen_rows(rows: RowSet, runs: list[Path], log: LogFn) -> RowSet:
    """Return the rows that are not in the training tables of the runs; raise UserError if most are."""
    seen = np.zeros(len(rows), bool)
    for run in runs:
        table: Any = getattr(RunDir(run).recorded_spec().data, "path", None)
        if table is None or not table_kind(Path(table)) or not Path(table).is_file():
            log(f"  the training table of {run} is gone: not checked for these rows")
            continue
        found = _find_rows_in(rows, Path(table))
        if found.mean() > MAX_SEEN:
            shared = f"{found.sum():,} of the {len(rows):,} rows of {rows.file} are in {table}, which {run} saw"
            raise invalid_data(f"{shared}; give others as  data.path=FILE,  or  model.members", "data.path")
        seen |= found
    if seen.any():
        log(f"  {seen.sum():,} of the {len(rows):,} rows are left out: members were trained on them")
    return rows.select(~seen)


def _find_rows_in(rows: RowSet, table: Path) -> np.ndarray:
    if table.resolve() == rows.file.resolve():
        return np.ones(len(rows), bool)
    first: Row = next(iter_rows(table, table_kind(table)), {})
    columns = [name for name in rows.columns if name in first]
    known = {_hash_cells(row, columns) for row in iter_rows(table, table_kind(table))} if columns else ()
    return np.array([_hash_cells(row, columns) in known for row in rows.rows()], bool)


def _hash_cells(row: Row, columns: Sequence[str]) -> bytes:
    text = "\x1f".join(format_label(row.get(name)) for name in columns)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
