"""Read tables (csv, tsv, jsonl, Parquet; text may be gzip): all rows, or chosen columns, one row or batch at a time."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import check_file, invalid_data, invalid_format, iter_lines
from paceline.errors import UserError, did_you_mean, get_first_line, join_names, not_installed
from paceline.io.files import check_regular

TABLE_KINDS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
MAX_FIELD_CHARACTERS = 1 << 24  # a longer field of a csv file means that a quote was left open
PARQUET_BATCH_ROWS = 1024
STREAMED_BYTES = 1 << 16
JSON_EXAMPLE = '{"text": "some words", "label": "news"}'


def table_kind(path: Path, kinds: Mapping[str, str] = TABLE_KINDS) -> str:
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return kinds.get(name.suffix.lower(), "")


def check_table(path: Path, key: str, kinds: Mapping[str, str] = TABLE_KINDS) -> tuple[Path, str]:
    """Return the path of a table that exists, and its kind by the end of its name."""
    file = check_file(path, key)
    if kind := table_kind(file, kinds):
        return file, kind
    raise invalid_format(f"{key}={file}: the name must end in one of {', '.join(kinds)}; .gz may follow", key)


def check_columns(wanted: Mapping[str, str], columns: Iterable[str], where: object) -> None:
    """Raise UserError if a wanted column is missing; `wanted` maps the option that names a column to the column."""
    for option, name in wanted.items():
        if name not in columns:
            names = [str(column) for column in columns]
            change = f"; type  {option}{' ' if option.startswith('-') else '='}COLUMN" if option else ""
            found = f"{did_you_mean(name, names, cutoff=0.6)} (columns: {join_names(names, 12) or 'none'})"
            raise UserError(f"{where}: no column {name!r}{found}{change}", code="unknown-name", key=option)


def locate_row(file: Path, kind: str, number: int) -> str:
    return f"{file} {'line' if kind == 'jsonl' else 'row'} {number}"


def iter_rows(file: Path, kind: str, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield every row by column name. `names` are the columns of a csv or tsv file without a header."""
    if kind == "parquet":
        with open_parquet(file) as opened:
            for batch in opened.iter_batches(PARQUET_BATCH_ROWS, use_threads=False):
                yield from batch.to_pylist()
    elif kind == "jsonl":
        yield from (row for _, row in iter_json_lines(file))
    else:
        header, records = open_csv(file, kind, names)
        for number, fields in records:
            if len(fields) != len(header):
                raise _row_length_error(file, number, fields, header)
            yield dict(zip(header, fields, strict=True))


def iter_columns(file: Path, kind: str, wanted: Mapping[str, str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (row number, values of the wanted columns) of every row; `wanted` is as in `check_columns`."""
    names = list(wanted.values())
    if kind == "parquet":
        with open_parquet(file) as opened:
            check_columns(wanted, opened.schema_arrow.names, file)
            batches = opened.iter_batches(PARQUET_BATCH_ROWS, columns=names, use_threads=False)
            columns = ([batch.column(name).to_pylist() for name in names] for batch in batches)
            yield from enumerate((row for some in columns for row in zip(*some, strict=True)), 1)
    elif kind == "jsonl":
        for number, row in iter_json_lines(file):
            check_columns(wanted, row, f"{file} line {number}")
            yield number, tuple(row[name] for name in names)
    else:
        header, records = open_csv(file, kind)
        check_columns(wanted, header, file)
        places = [header.index(name) for name in names]
        for number, fields in records:
            if len(fields) <= max(places):
                raise _row_length_error(file, number, fields, header)
            yield number, tuple(fields[place] for place in places)


def iter_json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of each line that is not blank; raise UserError for one that is no object."""
    for number, line in enumerate(iter_lines(file), 1):
        if not line.strip():
            continue
        row, reason = None, "not an object"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition(" (char")[0]
        if not isinstance(row, dict):
            raise invalid_format(f"{file} line {number}: not JSON ({reason}); write lines like  {JSON_EXAMPLE}")
        if "\\u" in line:  # an escape can spell half a character, which cannot be encoded
            row = {_replace_surrogates(name): _replace_surrogates(value) for name, value in row.items()}
        yield number, row


def _replace_surrogates(value: Any) -> Any:
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value


def open_csv(
    file: Path, kind: str = "csv", names: Sequence[str] | None = None
) -> tuple[Sequence[str], Iterator[tuple[int, list[str]]]]:
    """Return the header (`names`, if the file has none) and (row number from 1, fields) of every record."""
    tabs = kind == "tsv" or ".tsv" in file.suffixes[-2:]
    records = _iter_csv_records(file, "\t" if tabs else ",")
    header = next(records, []) if names is None else names
    if names is None and len(header) > 1:
        records = _reject_repeated_header(records, header, file)
    return header, enumerate(records, 1)


def _iter_csv_records(file: Path, delimiter: str) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(iter_lines(file), delimiter=delimiter, strict=True)
    try:
        yield from (fields for fields in reader if fields)
    except csv.Error as error:
        where = f"{file} near line {reader.line_num}"
        raise invalid_format(f"{where}: not valid csv ({error}); write a quote inside a quoted field twice") from None


def _reject_repeated_header(records: Iterator[list[str]], header: Sequence[str], file: Path) -> Iterator[list[str]]:
    """Reject the header as a row, which it is in files that were concatenated."""
    for number, fields in enumerate(records, 1):
        if fields == header:
            raise invalid_format(f"{file} row {number} repeats the header; remove it")
        yield fields


def _row_length_error(file: Path, number: int, fields: Sequence[str], header: Sequence[str]) -> UserError:
    found = f"{len(fields)} columns, expected {len(header)} ({join_names(header, 12)})"
    return invalid_format(f"{file} row {number} has {found}; quote a text with separators or line breaks")


@contextmanager
def open_parquet(path: Path, streamed: bool = False) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`; `streamed`: read columns in small pieces, for callers that stop early."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise not_installed(path, "pyarrow", "paceline[parquet]") from None
    try:
        check_regular(path)
        with pyarrow.parquet.ParquetFile(path, buffer_size=STREAMED_BYTES if streamed else 0) as file:
            yield file
    except UnicodeDecodeError:
        raise invalid_format(f"{path}: a text in it is not UTF-8; write its columns as strings") from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = get_first_line(error)
        raise UserError(f"{path}: not a readable Parquet file ({reason}); copy it again", code="unreadable") from None


class Columns:
    """A table in memory, by column; row i of each column belongs to sample i."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
        self.path, self.columns = path, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def texts(self, name: str) -> list[str]:
        return ["" if value is None else _format_value(value) for value in self._require_column(name)]

    def numbers(self, *names: str) -> np.ndarray:
        return np.stack([self._parse_numbers(name) for name in names], axis=1)

    def categories(self, *names: str) -> dict[str, list[str]]:
        return {name: sorted(set(self.texts(name))) for name in names}

    def codes(self, categories: Mapping[str, Sequence[str]]) -> np.ndarray:
        """Return columns as the index of each text among its categories, those of the training split for all splits."""
        return np.stack([self._parse_categories(name, words) for name, words in categories.items()], axis=1)

    def _parse_categories(self, name: str, words: Sequence[str]) -> np.ndarray:
        index = {word: number for number, word in enumerate(words)}
        texts = self.texts(name)
        for row, text in enumerate(texts, 1):
            if text not in index:
                unknown = f"not one of {len(index)} categories{did_you_mean(text, index)}"
                raise invalid_data(f"{self.path} row {row}: {name!r} is {text!r}, {unknown}", name)
        return np.array([index[text] for text in texts], np.int64)

    def _parse_numbers(self, name: str) -> np.ndarray:
        numbers = np.empty(len(self), np.float32)
        for row, value in enumerate(self._require_column(name)):
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                given = "missing" if value in (None, "") else f"{value!r:.60}"
                raise invalid_data(f"{self.path} row {row + 1}: {name!r} is {given}, expected a number", name)
            numbers[row] = number
        return numbers

    def _require_column(self, name: str) -> Sequence[Any]:
        check_columns({"": name}, self.columns, self.path)
        return self.columns[name]


def read_table(path: str | Path, names: Sequence[str] | None = None) -> Columns:
    """Read a whole table into memory. `names` are the columns of a csv or tsv file without a header."""
    file, kind = check_table(Path(path), "read_table")
    columns: dict[str, list[Any]] = {}
    for before, row in enumerate(iter_rows(file, kind, names)):
        if kind in ("csv", "tsv"):
            row = {name.strip(): value.strip() for name, value in row.items()}
        for name in row:
            if name not in columns:
                columns[name] = [None] * before
        for name, column in columns.items():
            column.append(row.get(name))
    if not columns:
        raise invalid_data(f"{file}: there are no rows")
    return Columns(file, columns)


def _format_value(value: Any) -> str:
    """Format a value so that 3 is the same text from every kind of file."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def format_label(value: Any) -> str:
    """Format the name of a class: 4, 4.0 and " 4" are the same one, in every kind of file, and so are True and true."""
    text = "" if value is None else str(value).strip()
    if text.lower() in ("true", "false"):
        return text.title()
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return str(int(number)) if number.is_integer() else repr(number)
