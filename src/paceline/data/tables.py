"""Read tables (csv, tsv, jsonl, Parquet; gzip or not) row by row or in columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.files import (
    PARQUET_BATCH_ROWS,
    check_file,
    iter_csv_records,
    iter_json_lines,
    open_parquet,
    reject_repeated_header,
)
from paceline.errors import UserError, did_you_mean, join_names

TABLE_KINDS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class Columns:
    """Those of a file, by name; row i of each belongs to sample i."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
        self.path, self.columns = path, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, name: str) -> list[str]:
        """A column as words; what is missing is an empty text."""
        return ["" if value is None else _format_value(value) for value in self._column(name)]

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
            there = join_names(list(self.columns), 12)
            raise UserError(
                f"{self.path}: there is no column {name!r}{did_you_mean(name, self.columns)} (there: {there})"
            )
        return self.columns[name]


def read_table(path: str | Path, names: Sequence[str] | None = None) -> Columns:
    """The table in a file. `names` are those of the columns, for a csv or tsv file without a header."""
    file = check_file(Path(path), "read_table")
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    kind = TABLE_KINDS.get(suffix.lower())
    if kind is None:
        raise UserError(f"read_table={file}: the name must end in one of {', '.join(TABLE_KINDS)}; .gz may follow")
    rows = iter_rows(file, kind, names)
    columns = _collect_columns(rows if kind in ("jsonl", "parquet") else map(_strip_row, rows))
    if not columns:
        raise UserError(f"{file}: there are no rows")
    return Columns(file, columns)


def iter_rows(file: Path, kind: str, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every row of a file, by the names of its columns."""
    if kind == "parquet":
        with open_parquet(file) as opened:
            for batch in opened.iter_batches(PARQUET_BATCH_ROWS, use_threads=False):
                yield from batch.to_pylist()
    elif kind == "jsonl":
        for number, _, row in iter_json_lines(file):
            if not isinstance(row, dict):
                raise UserError(f'{file} line {number}: each line holds one object:  {{"text": "some words"}}')
            yield row
    else:
        records = iter_csv_records(file, "\t" if kind == "tsv" else ",")
        header = next(records, (0, []))[1] if names is None else names
        records = reject_repeated_header(records, header, file) if names is None else records
        for number, fields in records:
            if len(fields) != len(header):
                raise UserError(
                    f"{file} row {number + (names is not None)} has {len(fields)} columns, {len(header)} were expected "
                    f"({join_names(header, 12)}); quote a text that holds commas or line breaks"
                )
            yield dict(zip(header, fields, strict=True))


def _strip_row(row: Mapping[str, str]) -> dict[str, str]:
    return {name.strip(): value.strip() for name, value in row.items()}


def _collect_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """None where a row lacks a column that others have."""
    columns: dict[str, list[Any]] = {}
    for before, row in enumerate(rows):
        for name in row:
            if name not in columns:
                columns[name] = [None] * before
        for name, column in columns.items():
            column.append(row.get(name))
    return columns


def _format_value(value: Any) -> str:
    """3 means the same in every kind of file."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def format_label(value: Any) -> str:
    """A class by its name: 4, 4.0 and " 4" are the same one, in whatever kind of file they are."""
    text = "" if value is None else str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return str(int(number)) if number.is_integer() else repr(number)


RawRow = tuple[int, Any, Any]
"""(number, text, label), of which the latter two may be anything that the file can hold."""


class LabelledRow(NamedTuple):
    number: int  # of the row in its file, from 1; in jsonl, of the line
    text: str
    label: str


@dataclass(frozen=True)
class LabelledTable:
    """A file of the user's, and the names of its two columns."""

    path: Path
    kind: str
    """csv, jsonl or parquet."""
    text: str
    label: str

    def rows(self) -> Iterator[LabelledRow]:
        """The rows, in order."""
        read = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}[self.kind]
        for number, text, label in read(self):
            yield LabelledRow(number, self._checked_text(text, number), self._checked_label(label, number))

    def where(self, number: int) -> str:
        return f"{self.path} {'line' if self.kind == 'jsonl' else 'row'} {number}"

    def find_columns(self, names: Sequence[str], at: str = "") -> tuple[int, int]:
        """Where the two columns are; without one, an error that names the nearest."""
        for key, name in (("text", self.text), ("label", self.label)):
            if name not in names:
                raise UserError(
                    f"{self.path}{at}: there is no {key} column {name!r}{did_you_mean(name, names)} "
                    f"(there: {join_names(names, 12) or 'nothing'}); type  data.{key}=COLUMN"
                )
        return names.index(self.text), names.index(self.label)

    def _checked_text(self, value: Any, number: int) -> str:
        if isinstance(value, str):
            return value
        raise UserError(
            f"{self.where(number)}: {self.text!r} is {_describe_kind(value)}, a text was expected; "
            'write an empty text as "" or leave the row out'
        )

    def _checked_label(self, value: Any, number: int) -> str:
        """Labels are compared as words, so that 3 means the same in every kind of file."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str | int) and str(value).strip():
            return str(value).strip()
        given = "empty" if isinstance(value, str) else _describe_kind(value)
        raise UserError(
            f"{self.where(number)}: {self.label!r} is {given}; a label is a whole number or a word; "
            "type  data.label=COLUMN  or leave the row out"
        )


def _csv_rows(table: LabelledTable) -> Iterator[RawRow]:
    tabs = ".tsv" in table.path.suffixes[-2:]
    records = iter_csv_records(table.path, "\t" if tabs else ",")
    header = next(records, (0, []))[1]
    text_at, label_at = table.find_columns(header)
    for number, fields in reject_repeated_header(records, header, table.path):
        if len(fields) <= max(text_at, label_at):
            raise UserError(
                f"{table.path} row {number} has {len(fields)} column{'' if len(fields) == 1 else 's'}, the header has "
                f"{len(header)} ({join_names(header, 12)}); quote a text that holds line breaks"
            )
        yield number, fields[text_at], fields[label_at]


def _jsonl_rows(table: LabelledTable) -> Iterator[RawRow]:
    expected = f'each line holds one object:  {{"{table.text}": "some words", "{table.label}": "news"}}'
    for number, line, item in iter_json_lines(table.path, f"; {expected}"):
        if not isinstance(item, dict):
            raise UserError(f"{table.path} line {number}: this is {_describe_kind(item)}; {expected}")
        table.find_columns(list(item), f" line {number}")
        text = item[table.text]
        if "\\u" in line and isinstance(text, str):  # an escape can spell half a character, which no encoding can
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield number, text, item[table.label]


def _parquet_rows(table: LabelledTable) -> Iterator[RawRow]:
    with open_parquet(table.path) as file:
        table.find_columns(file.schema_arrow.names)
        wanted = [table.text, table.label]
        batches = file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted, use_threads=False)
        columns = ((batch.column(name).to_pylist() for name in wanted) for batch in batches)
        rows = (row for pair in columns for row in zip(*pair, strict=True))
        for number, (text, label) in enumerate(rows, 1):
            yield number, text, label


def _describe_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return f"the number {value}"
    return {"list": "a list", "dict": "an object", "str": "a text"}.get(type(value).__name__, "no text")
