"""What `paceline predict` is given: texts, or a file of them, with all of its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.corpora.tables import csv_records
from paceline.data.files import json_lines, open_text
from paceline.errors import UserError, did_you_mean

TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class Inputs:
    values: list[Any]
    """What the workload encodes."""
    rows: list[dict[str, Any]]
    """What is written beside each prediction."""


def read_inputs(words: Sequence[str], column: str = "", usual: str = "") -> Inputs:
    """Texts as they are; of a table, the column that is named, else the usual one, else each row as a dict."""
    tables = [word for word in words if _kind(word)]
    if not tables:
        values = [Path(word) if _is_file(word) else word for word in words]
        return Inputs(values, [{"input": str(word)} for word in words])
    if len(words) > 1:
        raise UserError(f"{tables[0]!r} is a table; give it alone, or texts without it")
    path = Path(tables[0])
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"there is no file {str(path)!r}{did_you_mean(path.name, beside)}")
    rows = list(_rows(path, _kind(tables[0])))
    if not rows:
        raise UserError(f"{path}: there are no rows")
    wanted = column or ("text" if _kind(tables[0]) == ".txt" else usual)
    if not wanted:
        return Inputs(list(rows), rows)
    for number, row in enumerate(rows, 1):
        if wanted not in row:
            raise UserError(
                f"{path} row {number}: there is no column {wanted!r}{did_you_mean(wanted, row)} "
                f"(there: {', '.join(map(str, row))}); type  --column NAME"
            )
    return Inputs([row[wanted] for row in rows], rows)


def _kind(word: str) -> str:
    """The suffix of a word that names a table; a text may end like one, but has a space somewhere."""
    name = word.removesuffix(".gz").lower()
    found = next((suffix for suffix in TABLES if name.endswith(suffix)), "")
    return found if found and (_is_file(word) or not any(map(str.isspace, word))) else ""


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with a sign that none has
        return False


def _rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    if kind == ".txt":
        with open_text(path) as file:
            yield from ({"text": line.rstrip("\r\n")} for line in file if line.strip())
    elif kind == ".jsonl":
        for number, _, value in json_lines(path):
            if not isinstance(value, dict):
                raise UserError(f'{path} line {number}: each line holds one object:  {{"text": "some words"}}')
            yield value
    elif kind == ".parquet":
        yield from _parquet_rows(path)
    else:
        records = csv_records(path, "\t" if kind == ".tsv" else ",")
        header = next(records, (0, []))[1]
        for number, fields in records:
            if len(fields) != len(header):
                raise UserError(
                    f"{path} row {number} has {len(fields)} columns, the header has {len(header)} "
                    f"({', '.join(header)}); quote a text that holds line breaks"
                )
            yield dict(zip(header, fields, strict=True))


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("a parquet file needs pyarrow: pip install 'paceline[parquet]'") from None
    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
