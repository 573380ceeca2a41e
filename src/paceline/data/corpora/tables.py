"""Rows of the user's own files: a text and a label, found by the names of their columns.

The files stream: one row (csv, jsonl) or one batch of rows (parquet) is in memory at a time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.files import nearest, open_text
from paceline.errors import UserError
from paceline.workloads.classifier.sections import TextData

MAX_FIELD_CHARACTERS = 1 << 24  # a longer field means that a quote was left open
PARQUET_BATCH_ROWS = 1024


class Row(NamedTuple):
    number: int  # of the row in its file, from 1; in jsonl, of the line
    text: str
    label: str


def rows(path: Path, data: TextData) -> Iterator[Row]:
    """The rows of one file, in order."""
    read = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}[data.source]
    return read(path, data)


def place(path: Path, number: int, data: TextData) -> str:
    return f"{path} {'line' if data.source == 'jsonl' else 'row'} {number}"


def csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(number from 0, fields) of every record of a csv file; blank lines are none."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    with open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        number = 0
        try:
            for fields in reader:
                if fields:
                    yield number, fields
                    number += 1
        except csv.Error as error:
            raise UserError(
                f"{path} near line {reader.line_num}: not valid csv ({error}); "
                'write a quote inside a quoted field twice:  "say ""yes"" now"'
            ) from None


def _csv_rows(path: Path, data: TextData) -> Iterator[Row]:
    tabs = ".tsv" in path.suffixes[-2:]
    records = csv_records(path, "\t" if tabs else ",")
    header = next(records, (0, []))[1]
    columns = [_column(header, name, key, path) for key, name in (("text", data.text), ("label", data.label))]
    text_at, label_at = columns
    for number, fields in records:
        if len(fields) <= max(columns):
            raise UserError(
                f"{path} row {number} has {_count(len(fields), 'column')}, the header has {len(header)} "
                f"({', '.join(header)}); quote a text that holds line breaks"
            )
        yield Row(number, fields[text_at], _label(fields[label_at], path, number, data))


def _jsonl_rows(path: Path, data: TextData) -> Iterator[Row]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path} line {number}: not JSON ({error.msg} at column {error.colno}); "
                    f"each line holds one object:  {_example(data)}"
                ) from None
            if not isinstance(item, dict):
                raise UserError(
                    f"{path} line {number}: this is {_kind(item)}; each line holds one object:  {_example(data)}"
                )
            for key, name in (("text", data.text), ("label", data.label)):
                if name not in item:
                    _column(list(item), name, key, path, f" line {number}")
            text = _text(item[data.text], path, number, data)
            if "\\u" in line:  # an escape can spell half a character, which no other encoding can
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield Row(number, text, _label(item[data.label], path, number, data))


def _parquet_rows(path: Path, data: TextData) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "data.source=parquet needs pyarrow, which is not installed; type  pip install 'paceline[parquet]'"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for key, name in (("text", data.text), ("label", data.label)):
                _column(names, name, key, path)
            wanted = [data.text, data.label]
            number = 0
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted, use_threads=False):
                texts, labels = (batch.column(name).to_pylist() for name in wanted)
                for text, label in zip(texts, labels, strict=True):
                    number += 1
                    yield Row(number, _text(text, path, number, data), _label(label, path, number, data))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file ({reason}); write it again or copy it again") from None


def _column(names: Sequence[str], name: str, key: str, path: Path, at: str = "") -> int:
    """Where the column is; without it, an error that names the nearest."""
    if name in names:
        return list(names).index(name)
    hint = nearest(name, names)
    there = ", ".join(names) or "nothing"
    raise UserError(f"{path}{at}: there is no {key} column {name!r}{hint} (there: {there}); type  data.{key}=COLUMN")


def _text(value: Any, path: Path, number: int, data: TextData) -> str:
    if isinstance(value, str):
        return value
    raise UserError(
        f"{place(path, number, data)}: {data.text!r} is {_kind(value)}, a text was expected; "
        'write an empty text as "" or leave the row out'
    )


def _label(value: Any, path: Path, number: int, data: TextData) -> str:
    """Labels are compared as words, so that 3 means the same in every kind of file."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str | int) and str(value).strip():
        return str(value).strip()
    given = "empty" if isinstance(value, str) else _kind(value)
    raise UserError(
        f"{place(path, number, data)}: {data.label!r} is {given}; a label is a whole number or a word; "
        "type  data.label=COLUMN  or leave the row out"
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return f"the number {value}"
    return {"list": "a list", "dict": "an object", "str": "a text"}.get(type(value).__name__, "no text")


def _example(data: TextData) -> str:
    return f'{{"{data.text}": "some words", "{data.label}": "news"}}'


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
