"""Find, open and hash the user's files: text or gzip; a file, a folder or a pattern."""

import codecs
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from paceline.errors import RunFailed, UserError, suggest_path
from paceline.io.files import check_regular, hash_file, hash_value, open_regular, read_text, write_atomic
from paceline.io.remote import fetch_data

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_CHARACTERS = 1 << 27  # a line is in memory as a whole
MAX_LOOKED_AT_BYTES = 64 << 20  # a plan hashes no more, so that it answers at once
SHARD_NAME = re.compile(r"[-_.](?P<number>\d+)-of-(?P<count>\d+)")


class TooManyFiles(UserError):
    """More files, or bytes of them, than a plan looks at."""


def check_file(path: Path, key: str) -> Path:
    """Return the path of a file that exists and is not empty. `key` is the field of the run file that named it."""
    path = fetch_data(path, key).expanduser()
    given = f"{key}={path}"
    try:
        if path.is_dir():
            raise invalid_data(f"{given}: this is a folder; type  {key}={path}/FILE", key)
        if not path.exists():
            raise missing_path_error(path, key, "file")
        check_regular(path)
        if path.stat().st_size == 0:
            raise invalid_data(f"{given}: the file is empty", key)
    except OSError as error:
        raise unreadable_error(given, error, key) from None
    return path


def missing_path_error(path: Path, key: str, expected: str) -> UserError:
    missing = "" if path.parent.is_dir() else f" (the folder {path.parent} does not exist either)"
    return UserError(f"{key}={path}: no such {expected}{missing}{suggest_path(path)}", code="not-found", key=key)


def invalid_data(message: str, key: str = "") -> UserError:
    return UserError(message, code="invalid-data", key=key)


def invalid_format(message: str, key: str = "") -> UserError:
    return UserError(message, code="invalid-format", key=key)


def unreadable_error(given: object, error: OSError, key: str = "") -> UserError:
    return UserError(f"{given}: cannot be read: {error.strerror or error}", code="unreadable", key=key)


def find_files(path: Path, key: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file, the files below a folder with these suffixes, or those that match a pattern, sorted by name.

    Hidden ones are skipped.
    """
    path = fetch_data(path, key).expanduser()
    given = f"{key}={path}"
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            below = iter_below(path, lambda name: name[0] != "." and name != "__pycache__")
            files = sorted(file for file in below if file.name.endswith(suffixes))
            if not files:
                kinds = " ".join(suffix for suffix in suffixes if not suffix.endswith(".gz"))
                raise invalid_data(f"{given}: the folder has no text files ({kinds}, or the same with .gz)", key)
        elif glob.has_magic(str(path)):
            files = sorted({Path(match) for match in glob.iglob(str(path), recursive=True) if os.path.isfile(match)})
            if not files:
                raise invalid_data(f"{given}: no file matches this pattern", key)
        else:
            raise missing_path_error(path, key, "file or folder")
        if not path.is_file():
            _require_all_shards(files, given, key)
        if not any(file.stat().st_size for file in files):
            which = "the file is" if len(files) == 1 else f"all {len(files)} files are"
            raise invalid_data(f"{given}: {which} empty", key)
    except OSError as error:
        raise unreadable_error(given, error, key) from None
    return files


def _require_all_shards(files: Sequence[Path], given: str, key: str) -> None:
    """Raise if one of the files that are numbered as in `train-00003-of-00010.jsonl` is missing."""
    shards: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if found := SHARD_NAME.search(file.name):
            name = f"{file.parent}/{file.name[: found.start()]}"
            shards.setdefault((name, int(found["count"])), set()).add(int(found["number"]))
    for (name, count), numbers in shards.items():
        first = int(0 not in numbers and count in numbers)  # they count from 0 or from 1
        if missing := sorted(set(range(first, first + min(count, len(numbers) + 1))) - numbers):
            raise invalid_data(f"{given}: shard {missing[0]} of {count} of {name} is missing; copy it again", key)


def iter_below(
    folder: Path, enter: Callable[[str], bool] = lambda name: True, most: int | None = None
) -> Iterator[Path]:
    """Yield the files below a folder, unsorted, if `enter` accepts their names, without links to folders.

    Raise TooManyFiles after `most` files and folders.
    """
    folders, seen = [str(folder)], 0
    while folders:
        with suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen += 1
                if most is not None and seen > most:
                    raise TooManyFiles(f"{folder}: more than {most:,} files and folders; not looked at")
                if not enter(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif os.path.isfile(entry.path):
                    yield Path(entry.path)


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, decompressed on the fly if it is gzip; reading errors become UserError."""
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            yield text
    except UnicodeDecodeError:
        with _open_bytes(path) as raw:
            encoding = "UTF-16" if raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
        command = f"iconv -f {encoding} -t UTF-8 {path.name} > utf8-{path.name}"
        raise invalid_format(f"{path}: not UTF-8; convert it with  {command}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _gzip_error(path, error) from None
    except OSError as error:
        raise unreadable_error(path, error) from None


def iter_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with their ends; reject one that is too long to hold in memory."""
    with open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARACTERS), ""), 1):
            if len(line) == MAX_LINE_CHARACTERS:
                raise invalid_format(f"{path} line {number} has more than {len(line):,} characters; is this text?")
            yield line


def read_beginning(path: Path, most: int) -> tuple[bytes, float]:
    """Return the first bytes of a file, decompressed if it is gzip, and how many times larger the whole is."""
    with open_regular(path) as file:
        content = file.read(most)
    text, read = content, len(content)
    if content.startswith(GZIP_MAGIC):
        unzip = zlib.decompressobj(wbits=31)
        try:
            text = unzip.decompress(content, most)
        except zlib.error as error:
            raise _gzip_error(path, error) from None
        read -= len(unzip.unconsumed_tail)
    return text, path.stat().st_size / max(1, read)


def _open_bytes(path: Path) -> BinaryIO:
    with open_regular(path) as file:
        zipped = path.suffix == ".gz" or file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else open_regular(path)  # type: ignore[return-value]


def _gzip_error(path: Path, error: Exception) -> UserError:
    return invalid_format(f"{path}: the gzip data is broken ({error}); copy the file again")


def hash_text(text: str) -> int:
    """Hash a text to a number below 2^64."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def hash_files(paths: Iterable[Path]) -> str:
    """Hash the contents of files, independent of their names."""
    whole = hashlib.sha256()
    for path in paths:
        try:
            whole.update(bytes.fromhex(hash_file(path)))
        except OSError as error:
            raise unreadable_error(path, error) from None
    return whole.hexdigest()


def hash_files_cached(files: Sequence[Path], folder: Path, looking: bool = False) -> str:
    """Hash the contents of files, or take their hash from a note in `folder`, named by their sizes and times.

    One process reads the files; other ranks and a plan read the note. `looking`: raise UserError rather than read much.
    """
    stats = [(file, file.stat()) for file in files]
    facts = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in stats]
    note = folder / f"text-{hash_value(facts)[:16]}.digest"
    with suppress(OSError, ValueError):
        found, check = read_text(note).split(" ")
        if check == hash_value(found):
            return found
    if looking and sum(stat.st_size for _, stat in stats) > MAX_LOOKED_AT_BYTES:
        raise TooManyFiles(f"{files[0]}: more than {MAX_LOOKED_AT_BYTES:,} bytes; not looked at")
    found = hash_files(files)
    with suppress(OSError, RunFailed):  # reported where the corpus is written
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(note, f"{found} {hash_value(found)}")
    return found
