"""Opening the user's files (text, csv, jsonl, Parquet): found, readable, gzip or not; and if not, a line says so."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from paceline.errors import UserError, did_you_mean
from paceline.plain_files import check_plain, open_plain

GZIP_MAGIC = b"\x1f\x8b"
MAX_FIELD_CHARACTERS = 1 << 24
"""A longer field of a csv file means that a quote was left open."""
MAX_LINE_CHARACTERS = 1 << 27
"""A line is in memory as a whole."""
PARQUET_BATCH_ROWS = 1024
STREAMED_BYTES = 1 << 16


def check_file(path: Path, key: str) -> Path:
    """The path of a file that is there and holds something. `key` is the field of the run file that named it."""
    path = path.expanduser()
    given = f"{key}={path}"
    try:
        if path.is_dir():
            raise UserError(f"{given}: this is a folder, a file was expected; type  {key}={path}/FILE")
        if not path.exists():
            raise not_there(path, key, "file")
        check_plain(path)
        if path.stat().st_size == 0:
            raise UserError(f"{given}: the file is empty; at least two rows of two classes are needed")
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    return path


def not_there(path: Path, key: str, expected: str) -> UserError:
    """The error for a path that does not exist; it names the nearest one that does."""
    there = path.parent.is_dir()
    missing = "" if there else f" (nor is there the folder {path.parent})"
    hint = did_you_mean(path.name, (sibling.name for sibling in path.parent.iterdir())) if there else ""
    return UserError(f"{key}={path}: there is no such {expected}{missing}{hint}")


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A UTF-8 text file, unzipped on the fly where it is gzip. A reading error becomes a UserError."""
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            yield text
    except UnicodeDecodeError:
        raise UserError(
            f"{path} {_first_line_not_utf8(path)}: the text is not UTF-8; "
            f"convert it with  iconv -f {_encoding(path)} -t UTF-8 {path.name} > utf8-{path.name}"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the gzip data is broken ({error}); copy the file again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, with their ends; one that does not end is no line."""
    with open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS), ""), 1):
            if len(line) == MAX_LINE_CHARACTERS:
                raise UserError(f"{path} line {number} has more than {len(line):,} characters; is this a text?")
            yield line


def json_lines(path: Path, hint: str = "") -> Iterator[tuple[int, str, Any]]:
    """(number from 1, text, value) of every line that is not blank."""
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                said = f"not JSON ({error.msg} at column {error.colno}){hint}"
                raise UserError(f"{path} line {number}: {said}") from None
            except (ValueError, RecursionError):
                said = "a number of thousands of digits, or brackets without end"
                raise UserError(f"{path} line {number}: not JSON that can be read ({said})") from None
            yield number, line, value


def csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(number from 0, fields) of every record of a csv file; blank lines are none."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
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


def no_header_again(
    records: Iterable[tuple[int, list[str]]], header: Sequence[str], path: Path
) -> Iterator[tuple[int, list[str]]]:
    """The records, none of which says what the columns are called: files that were joined have such rows."""
    for number, fields in records:
        if fields == list(header):
            awk, name = "awk 'NR == 1 { h = $0 } NR == 1 || $0 != h'", shlex.quote(path.name)
            raise UserError(
                f"{path} row {number} repeats the header; leave such rows out, with  {awk} {name} > joined-{name}"
            )
        yield number, fields


@contextmanager
def open_parquet(path: Path, streamed: bool = False) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. What goes wrong inside is the user's file, and is said so.

    `streamed`: of a column that is read in batches, no more than these is read.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: Parquet needs pyarrow, which is not installed; type  pip install 'paceline[parquet]'"
        ) from None
    try:
        check_plain(path)
        with pyarrow.parquet.ParquetFile(path, buffer_size=STREAMED_BYTES if streamed else 0) as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: a text in it is not UTF-8 (byte {error.object[error.start]:#04x}); write its columns again as "
            "strings, decoded from what they are"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or ["damaged"])[0]
        raise UserError(f"{path}: not a readable Parquet file ({reason}); write it again or copy it again") from None


def digest_of_value(value: object) -> str:
    """A hash of a value that JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def hash64(text: str) -> int:
    """A number below 2^64 that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def digest_of_files(paths: Iterable[Path]) -> str:
    """One hash of the contents of these files, whatever they are called."""
    whole = hashlib.sha256()
    for path in paths:
        try:
            with open_plain(path) as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return whole.hexdigest()


def beginning_of(path: Path, most: int) -> tuple[bytes, float]:
    """The first bytes of a file, unzipped where it is gzip, and how many times as much the whole is."""
    with open_plain(path) as file:
        content = file.read(most)
    text, read = content, len(content)
    if content.startswith(GZIP_MAGIC):
        unzip = zlib.decompressobj(wbits=31)
        try:
            text = unzip.decompress(content, most)
        except zlib.error as error:
            raise UserError(f"{path}: the gzip data is broken ({error}); copy the file again") from None
        read -= len(unzip.unconsumed_tail)
    return text, path.stat().st_size / max(1, read)


def _open_bytes(path: Path) -> BinaryIO:
    with open_plain(path) as file:
        zipped = path.suffix == ".gz" or file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else open_plain(path)  # type: ignore[return-value]


def _encoding(path: Path) -> str:
    """What the first bytes say, as Windows writes them, or the most usual."""
    with _open_bytes(path) as raw:
        first = raw.read(4)
    marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16"}
    marks[codecs.BOM_UTF16_BE] = "UTF-16"
    return next((name for mark, name in marks.items() if first.startswith(mark)), "LATIN1")


def _first_line_not_utf8(path: Path) -> str:
    """Decoding runs ahead of the rows by a buffer, so the line is looked for again."""
    with _open_bytes(path) as raw:
        for number, line in enumerate(raw, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number} (byte {line[error.start]:#04x})"
    return ""
