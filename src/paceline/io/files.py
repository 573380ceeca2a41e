"""Write files atomically, read and write JSON, and lock files.

A kill, a full disk or a second reader never meets half of a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

from paceline.errors import RunFailed, UserError
from paceline.io.escape import replace_hidden
from paceline.io.safe_open import open_regular, read_text
from paceline.io.terminal import print_text

T = TypeVar("T")
MOST_DIGITS = 19
SEAL = "seal"


def write_atomic(path: Path, text: str | bytes) -> None:
    """Put `text` at `path` in one go: a sibling is written, forced to the disk and renamed over it."""
    content = text.encode(errors="replace") if isinstance(text, str) else text  # half of a sign, as JSON can spell it
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(content)
                sync_file(file)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a file system that cannot
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs: keys in the order given, and null where a number is not finite."""
    write_atomic(
        path,
        json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False, default=to_json_value)
        + "\n",
    )


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """The same with a checksum of itself, for values that an answer comes from."""
    write_json(path, {**value, SEAL: _seal(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read back what `write_sealed` wrote, unless it was changed since. Older files have no seal."""
    value = read_json(path)
    try:
        seal = _seal(value)
    except RecursionError:
        raise UserError(f"{path} is damaged: it is nested without end") from None
    if value.pop(SEAL, seal) != seal:
        raise UserError(f"{path} is damaged: it is not what was written there, its checksum differs")
    return value


def _seal(value: Mapping[str, Any]) -> str:
    inside = {name: inner for name, inner in value.items() if name != SEAL}
    return compute_seal(json.loads(json.dumps(replace_nonfinite(inside), default=to_json_value)))


def compute_seal(value: Mapping[str, Any]) -> str:
    """A checksum of what JSON holds, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file; OSError where it is none."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_json(value: Any) -> None:
    """For other programs: to standard output, and nan as null."""
    text = json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, default=to_json_value)
    print_text(
        replace_hidden(text, lambda sign: json.dumps(sign)[1:-1])
    )  # as JSON spells them: what is read back is the same


def read_json(path: Path) -> dict[str, Any]:
    """Read back what `write_json` wrote."""
    try:
        value = json.loads(read_text(path), parse_int=_whole_number, parse_constant=_whole_number)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds a {type(value).__name__}, not a set of named values")
    return value


def _whole_number(digits: str) -> int:
    """Nothing that is counted here has more digits, and what is not finite is written as null."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{digits[:20]}… is too large")
    return int(digits)


def replace_nonfinite(value: Any) -> Any:
    """The same value with None for every NaN and infinity, which JSON cannot write."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(inner) for inner in value]
    if not isinstance(value, (str, bytes, bool, int, float, type(None))):
        return replace_nonfinite(to_json_value(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json_value(value: Any) -> Any:
    """Array scalars and small arrays as numbers and lists; anything else that JSON has no word for as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_flat(record: Any) -> dict[str, Any]:
    """Every field of a dataclass by name, those of dataclasses inside it beside them."""
    found: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        found |= to_flat(value) if is_dataclass(value) else {field.name: value}
    return found


def from_flat(kind: type[T], values: Mapping[str, Any]) -> T:
    """The inverse: lists become tuples, unknown keys are left out, and what is not there has its default."""
    given: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for name, hint in ((field.name, hints[field.name]) for field in fields(kind)):  # type: ignore[arg-type]
        if isinstance(hint, type) and is_dataclass(hint):
            given[name] = from_flat(hint, values)
        elif name in values:
            is_enum = isinstance(hint, type) and issubclass(hint, Enum)
            given[name] = hint(values[name]) if is_enum else _checked(hint, _as_tuple(values[name]))
    return kind(**given)


def validate_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some fields of a dataclass, each of its kind; ValueError if one is not. Lists become tuples."""
    if not isinstance(values, Mapping):
        raise ValueError(f"it holds a {type(values).__name__}, not a set of named values")
    hints = get_type_hints(kind)
    return {name: _checked(hints[name], _as_tuple(value)) for name, value in values.items()}


def _checked(hint: Any, value: T) -> T:
    """The value, if it is of its kind; ValueError if it is not. Numbers in a table may be missing."""
    known = {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value
    try:
        _adapter(hint).validate_python(known, strict=True)
    except ValueError:  # which says so in several lines
        raise ValueError(f"{value!r:.60} is not of the kind that belongs there") from None
    return value


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def hold_lock(file: Path, on_wait: Callable[[], None], timeout_s: float = -1) -> Iterator[bool]:
    """Hold an exclusive lock, and yield whether it is held: some network file systems have none.

    Calls `on_wait` once if another process holds it. Raises TimeoutError after `timeout_s` (never, if negative), and
    another OSError if the file cannot be opened.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire(timeout_s, poll_interval=1)
    except OSError as error:
        if error.errno not in LOCKS_UNSUPPORTED:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()
