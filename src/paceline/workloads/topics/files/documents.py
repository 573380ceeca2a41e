"""Texts of the user's files, one document at a time, with their names where they have some."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.data.files import json_lines, open_text
from paceline.errors import UserError, did_you_mean
from paceline.workloads.topics.files.parquet import holds_counts, opened
from paceline.workloads.topics.files.shards import MANIFEST

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
BATCH_ROWS = 1024  # of a Parquet file


def is_text(path: Path) -> bool:
    """Whether `read_counts` takes this path for texts."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and next(_text_files(path), None) is not None
    if path.suffix.lower() == ".parquet" and path.is_file():
        return not holds_counts(path)
    return path.is_file() and _suffix(path) in SUFFIXES


def _suffix(path: Path) -> str:
    """The last one, in lower case, of what is compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def documents(
    source: str | Path | Sequence[str], column: str, name_column: str | None
) -> Iterator[tuple[str | None, str]]:
    """(name or None, text) of every document."""
    if not isinstance(source, str | Path):
        return ((None, text) for text in source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file or folder")
    suffix = _suffix(path)
    if suffix in (".csv", ".tsv"):
        return _csv(path, column, name_column, "\t" if suffix == ".tsv" else ",")
    if suffix in (".jsonl", ".ndjson"):
        return _jsonl(path, column, name_column)
    if suffix == ".parquet":
        return _parquet(path, column, name_column)
    return _lines(path)


def _text_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.name.lower().endswith((".txt", ".txt.gz")) and path.is_file())


def _folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(_text_files(folder)):
        with open_text(path) as file:
            yield str(path.relative_to(folder)), file.read()


def _lines(path: Path) -> Iterator[tuple[None, str]]:
    with open_text(path) as file:
        for line in file:
            yield None, line


def _csv(path: Path, column: str, name_column: str | None, delimiter: str) -> Iterator[tuple[str | None, str]]:
    from paceline.data.corpora.tables import csv_records

    records = csv_records(path, delimiter)
    header = next(records, (0, []))[1]
    text_at = column_at(header, column, path)
    name_at = None if name_column is None else column_at(header, name_column, path)
    for number, fields in records:
        if len(fields) <= max(text_at, name_at or 0):
            raise UserError(
                f"{path} row {number}: {len(fields)} columns, the header has {len(header)}; quote a text that holds "
                "line breaks or the separator"
            )
        yield None if name_at is None else fields[name_at], fields[text_at]


def _jsonl(path: Path, column: str, name_column: str | None) -> Iterator[tuple[str | None, str]]:
    for number, _, item in json_lines(path):
        if not isinstance(item, dict):
            raise UserError(f'{path} line {number}: each line holds one object:  {{"{column}": "words"}}')
        for wanted in (column, name_column):
            if wanted is not None and wanted not in item:
                column_at(list(item), wanted, path, f" line {number}")
        text = item[column]
        if not isinstance(text, str):
            raise UserError(f"{path} line {number}: {column!r} is not a text but {json.dumps(text)[:40]}")
        yield str(item[name_column]) if name_column else None, text


def _parquet(path: Path, column: str, name_column: str | None) -> Iterator[tuple[str | None, str]]:
    wanted = [column] + ([name_column] if name_column else [])
    with opened(path) as file:
        for name in wanted:
            column_at(file.schema_arrow.names, name, path)
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
            values = batch.column(column).to_pylist()
            names = batch.column(name_column).to_pylist() if name_column else [None] * len(values)
            for document, text in zip(names, values, strict=True):
                number += 1
                if not isinstance(text, str):
                    raise UserError(f"{path} row {number}: {column!r} is not a text but {text!r:.40}")
                yield None if name_column is None else str(document), text


def column_at(columns: Sequence[str], name: str, path: Path, where: str = "") -> int:
    """Where the column is; without it, an error that names those that are there."""
    if name in columns:
        return list(columns).index(name)
    there = ", ".join(columns) or "nothing"
    raise UserError(
        f"{path}{where}: there is no column {name!r}{did_you_mean(name, columns)} (there: {there}); name it as  "
        "--text NAME  or  TextOptions(column=NAME)"
    )
