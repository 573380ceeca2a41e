"""Rows of the user's own files: a text and a label, found by the names of their columns.

The files stream: one row (csv, jsonl) or one batch of rows (parquet) is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.files import PARQUET_BATCH_ROWS, csv_records, json_lines, no_header_again, open_parquet
from paceline.errors import UserError, did_you_mean, listed

RawRow = tuple[int, Any, Any]
"""(number, text, label), of which the latter two may be anything that the file can hold."""


class LabelledRow(NamedTuple):
    number: int  # of the row in its file, from 1; in jsonl, of the line
    text: str
    label: str


@dataclass(frozen=True)
class TextTable:
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
                    f"(there: {listed(names, 12) or 'nothing'}); type  data.{key}=COLUMN"
                )
        return names.index(self.text), names.index(self.label)

    def _checked_text(self, value: Any, number: int) -> str:
        if isinstance(value, str):
            return value
        raise UserError(
            f"{self.where(number)}: {self.text!r} is {_kind(value)}, a text was expected; "
            'write an empty text as "" or leave the row out'
        )

    def _checked_label(self, value: Any, number: int) -> str:
        """Labels are compared as words, so that 3 means the same in every kind of file."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str | int) and str(value).strip():
            return str(value).strip()
        given = "empty" if isinstance(value, str) else _kind(value)
        raise UserError(
            f"{self.where(number)}: {self.label!r} is {given}; a label is a whole number or a word; "
            "type  data.label=COLUMN  or leave the row out"
        )


def _csv_rows(table: TextTable) -> Iterator[RawRow]:
    tabs = ".tsv" in table.path.suffixes[-2:]
    records = csv_records(table.path, "\t" if tabs else ",")
    header = next(records, (0, []))[1]
    text_at, label_at = table.find_columns(header)
    for number, fields in no_header_again(records, header, table.path):
        if len(fields) <= max(text_at, label_at):
            raise UserError(
                f"{table.path} row {number} has {len(fields)} column{'' if len(fields) == 1 else 's'}, the header has "
                f"{len(header)} ({listed(header, 12)}); quote a text that holds line breaks"
            )
        yield number, fields[text_at], fields[label_at]


def _jsonl_rows(table: TextTable) -> Iterator[RawRow]:
    expected = f'each line holds one object:  {{"{table.text}": "some words", "{table.label}": "news"}}'
    for number, line, item in json_lines(table.path, f"; {expected}"):
        if not isinstance(item, dict):
            raise UserError(f"{table.path} line {number}: this is {_kind(item)}; {expected}")
        table.find_columns(list(item), f" line {number}")
        text = item[table.text]
        if "\\u" in line and isinstance(text, str):  # an escape can spell half a character, which no encoding can
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield number, text, item[table.label]


def _parquet_rows(table: TextTable) -> Iterator[RawRow]:
    with open_parquet(table.path) as file:
        table.find_columns(file.schema_arrow.names)
        wanted = [table.text, table.label]
        batches = file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted, use_threads=False)
        columns = ((batch.column(name).to_pylist() for name in wanted) for batch in batches)
        rows = (row for pair in columns for row in zip(*pair, strict=True))
        for number, (text, label) in enumerate(rows, 1):
            yield number, text, label


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return f"the number {value}"
    return {"list": "a list", "dict": "an object", "str": "a text"}.get(type(value).__name__, "no text")
