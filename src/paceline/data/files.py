"""Find, open and hash the user's files: text or gzip; a file, a folder or a pattern."""

from __future__ import annotations

import codecs
import csv
import fnmatch
import glob
import gzip
import hashlib
import io
import json
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from paceline.errors import RunFailed, UserError, did_you_mean
from paceline.io.files import write_atomic
from paceline.io.safe_open import check_regular, open_regular, read_text

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
            raise missing_path_error(path, key, "file")
        check_regular(path)
        if path.stat().st_size == 0:
            raise UserError(f"{given}: the file is empty; at least two rows of two classes are needed")
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    return path


def missing_path_error(path: Path, key: str, expected: str) -> UserError:
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
            f"{path} {_find_invalid_line(path)}: the text is not UTF-8; "
            f"convert it with  iconv -f {_guess_encoding(path)} -t UTF-8 {path.name} > utf8-{path.name}"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the gzip data is broken ({error}); copy the file again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def iter_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, with their ends; one that does not end is no line."""
    with open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS), ""), 1):
            if len(line) == MAX_LINE_CHARACTERS:
                raise UserError(f"{path} line {number} has more than {len(line):,} characters; is this a text?")
            yield line


def iter_json_lines(path: Path, hint: str = "") -> Iterator[tuple[int, str, Any]]:
    """(number from 1, text, value) of every line that is not blank."""
    for number, line in enumerate(iter_lines(path), 1):
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


def iter_csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(number from 0, fields) of every record of a csv file; blank lines are none."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(iter_lines(path), delimiter=delimiter, strict=True)
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


def reject_repeated_header(
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
        check_regular(path)
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


def hash_value(value: object) -> str:
    """A hash of a value that JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def hash_text(text: str) -> int:
    """A number below 2^64 that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def hash_files(paths: Iterable[Path]) -> str:
    """One hash of the contents of these files, whatever they are called."""
    whole = hashlib.sha256()
    for path in paths:
        try:
            with open_regular(path) as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return whole.hexdigest()


def read_beginning(path: Path, most: int) -> tuple[bytes, float]:
    """The first bytes of a file, unzipped where it is gzip, and how many times as much the whole is."""
    with open_regular(path) as file:
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
    with open_regular(path) as file:
        zipped = path.suffix == ".gz" or file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else open_regular(path)  # type: ignore[return-value]


def _guess_encoding(path: Path) -> str:
    """What the first bytes say, as Windows writes them, or the most usual."""
    with _open_bytes(path) as raw:
        first = raw.read(4)
    marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16"}
    marks[codecs.BOM_UTF16_BE] = "UTF-16"
    return next((name for mark, name in marks.items() if first.startswith(mark)), "LATIN1")


def _find_invalid_line(path: Path) -> str:
    """Decoding runs ahead of the rows by a buffer, so the line is looked for again."""
    with _open_bytes(path) as raw:
        for number, line in enumerate(raw, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number} (byte {line[error.start]:#04x})"
    return ""


MAX_LOOKED_AT_FILES = 10_000
"""Names of files and folders that a plan looks at: it answers at once, whatever a path leads to."""


class TooManyFiles(UserError):
    """More files than who only looks goes through."""


@dataclass
class FileWalk:
    """One walk through folders, which counts what it comes by."""

    most: int | None = None
    """Names after which it gives up; None goes through all."""
    seen: int = 0
    given: set[str] = field(default_factory=set)

    def iter_below(self, folder: Path, enter: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
        """The files in a folder and in those below whose names may be entered, in no order; no link to a folder is."""
        folders = [str(folder)]
        while folders:
            for entry in self._entries(folders.pop()):
                if not enter(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) or (entry.is_symlink() and os.path.isfile(entry.path)):
                    yield Path(entry.path)

    def iter_matches(self, pattern: Path) -> Iterator[Path]:
        """The files that match a pattern as those of `glob`, in no order; `**` goes through a circle of links once."""
        parts = [p for p, before in zip(pattern.parts, ("", *pattern.parts), strict=False) if not p == before == "**"]
        anchor = [pattern.anchor] if pattern.anchor else []
        waiting = [("".join(anchor), parts[len(anchor) :], frozenset[tuple[int, int]]())]
        while waiting:
            folder, (part, *rest), above = waiting.pop()
            if part == "**":
                found = os.stat(folder or ".")
                if (here := (found.st_dev, found.st_ino)) in above:
                    continue
                if rest:
                    waiting.append((folder, rest, frozenset()))
                inner, above = [part, *rest], above | {here}
            else:
                inner, above = rest, frozenset()
            for path in self._next(folder, part):
                if inner and os.path.isdir(path):
                    waiting.append((path, inner, above))
                elif not rest and path not in self.given and os.path.isfile(path):
                    self.given.add(path)
                    yield Path(path)

    def _next(self, folder: str, part: str) -> Iterator[str]:
        """What one part of a pattern stands for in a folder."""
        if part != "**" and not glob.has_magic(part):
            path = os.path.join(folder, part)
            return iter([path] if os.path.lexists(path) else [])
        wanted = "*" if part == "**" else part
        names = (entry.name for entry in self._entries(folder or "."))
        shown = (name for name in names if not name.startswith(".") or wanted.startswith("."))
        return (os.path.join(folder, name) for name in shown if fnmatch.fnmatch(name, wanted))

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Nothing where a folder may not be read."""
        try:
            opened = os.scandir(folder)
        except PermissionError:
            return
        with opened as entries:
            for entry in entries:
                self.seen += 1
                if self.most is not None and self.seen > self.most:
                    raise TooManyFiles(f"{folder}: there are more than {self.most:,} files and folders; not looked at")
                yield entry


MAX_LOOKED_AT_BYTES = 64 << 20
"""That who only looks reads to find prepared data; of larger files it takes the note alone."""


class TooManyBytes(UserError):
    """More bytes than who only looks reads."""


def hash_files_cached(files: Sequence[Path], folder: Path, looking: bool = False) -> str:
    """The hash, from the note in a folder or read now. `looking`: TooLong where that would take a while."""
    stats = [file.stat() for file in files]
    facts = [
        (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in zip(files, stats, strict=True)
    ]
    note = folder / f"text-{hash_value(facts)[:16]}.digest"
    with suppress(OSError, ValueError):
        found, check = read_text(note).split(" ")
        if check == hash_value(found):
            return found
    if looking and sum(stat.st_size for stat in stats) > MAX_LOOKED_AT_BYTES:
        raise TooManyBytes(f"{files[0]}: more than {MAX_LOOKED_AT_BYTES:,} bytes; not looked at")
    found = hash_files(files)
    with suppress(OSError, RunFailed):  # said where the corpus is written
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(note, f"{found} {hash_value(found)}")
    return found
