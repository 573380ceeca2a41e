"""A table of the user's (csv, tsv, jsonl, parquet) in columns: texts, numbers, and categories as whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import PARQUET_BATCH_ROWS, check_file, csv_records, json_lines, no_header_again, open_parquet
from paceline.errors import UserError, did_you_mean, listed

KINDS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class Columns:
    """Those of a file, by name; row i of each belongs to sample i."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
        self.path, self.columns = path, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, name: str) -> list[str]:
        """A column as words; what is missing is an empty text."""
        return ["" if value is None else _word(value) for value in self._column(name)]

    def numbers(self, *names: str) -> np.ndarray:
        """Columns as numbers, one row per sample."""
        return np.stack([self._numbers(name) for name in names], axis=1)

    def categories(self, *names: str) -> dict[str, list[str]]:
        """The words that occur in each of these columns, in alphabetical order."""
        return {name: sorted(set(self.texts(name))) for name in names}

    def codes(self, categories: Mapping[str, Sequence[str]]) -> np.ndarray:
        """Columns as the place of each word among its categories, one row per sample.

        Give a test split the categories of the training split, so that numbers mean the same in both.
        """
        return np.stack([self._codes(name, words) for name, words in categories.items()], axis=1)

    def _codes(self, name: str, words: Sequence[str]) -> np.ndarray:
        place = {word: number for number, word in enumerate(words)}
        texts = self.texts(name)
        for row, text in enumerate(texts, 1):
            if text not in place:
                raise UserError(
                    f"{self.path} row {row}: {name!r} is {text!r}, which is none of the {len(place)} categories"
                    f"{did_you_mean(text, place)}; add it to them, or leave the row out"
                )
        return np.array([place[text] for text in texts], np.int64)

    def _numbers(self, name: str) -> np.ndarray:
        found = np.empty(len(self), np.float32)
        for row, value in enumerate(self._column(name)):
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                said = "missing" if value in (None, "") else f"{value!r:.60}"
                raise UserError(
                    f"{self.path} row {row + 1}: {name!r} is {said}, a number was expected; read it with  "
                    f"texts({name!r})  or leave the row out"
                )
            found[row] = number
        return found

    def _column(self, name: str) -> Sequence[Any]:
        if name not in self.columns:
            there = listed(list(self.columns), 12)
            raise UserError(
                f"{self.path}: there is no column {name!r}{did_you_mean(name, self.columns)} (there: {there})"
            )
        return self.columns[name]


def read_table(path: str | Path, names: Sequence[str] | None = None) -> Columns:
    """The table in a file. `names` are those of the columns, for a csv or tsv file without a header."""
    file = check_file(Path(path), "read_table")
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    kind = KINDS.get(suffix.lower())
    if kind is None:
        raise UserError(f"read_table={file}: the name must end in one of {', '.join(KINDS)}; .gz may follow")
    rows = rows_of(file, kind, names)
    columns = _columns(rows if kind in ("jsonl", "parquet") else map(_stripped, rows))
    if not columns:
        raise UserError(f"{file}: there are no rows")
    return Columns(file, columns)


def rows_of(file: Path, kind: str, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every row of a file, by the names of its columns."""
    if kind == "parquet":
        with open_parquet(file) as opened:
            for batch in opened.iter_batches(PARQUET_BATCH_ROWS, use_threads=False):
                yield from batch.to_pylist()
    elif kind == "jsonl":
        for number, _, row in json_lines(file):
            if not isinstance(row, dict):
                raise UserError(f'{file} line {number}: each line holds one object:  {{"text": "some words"}}')
            yield row
    else:
        records = csv_records(file, "\t" if kind == "tsv" else ",")
        header = next(records, (0, []))[1] if names is None else names
        records = no_header_again(records, header, file) if names is None else records
        for number, fields in records:
            if len(fields) != len(header):
                raise UserError(
                    f"{file} row {number + (names is not None)} has {len(fields)} columns, {len(header)} were expected "
                    f"({listed(header, 12)}); quote a text that holds commas or line breaks"
                )
            yield dict(zip(header, fields, strict=True))


def _stripped(row: Mapping[str, str]) -> dict[str, str]:
    return {name.strip(): value.strip() for name, value in row.items()}


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """None where a row lacks a column that others have."""
    columns: dict[str, list[Any]] = {}
    for before, row in enumerate(rows):
        for name in row:
            if name not in columns:
                columns[name] = [None] * before
        for name, column in columns.items():
            column.append(row.get(name))
    return columns


def _word(value: Any) -> str:
    """3 means the same in every kind of file."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def word(value: Any) -> str:
    """A class by its name: 4, 4.0 and " 4" are the same one, in whatever kind of file they are."""
    text = "" if value is None else str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return str(int(number)) if number.is_integer() else repr(number)
