"""Open regular files, write files atomically, read and write JSON, and lock files."""

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

from paceline.errors import Code, RunFailed, UserError, suggest_path
from paceline.io.escape import replace_hidden
from paceline.io.terminal import print_text

T = TypeVar("T")
MAX_DIGITS = 19
SEAL = "seal"
MAX_BYTES = 1 << 28


def write_atomic(path: Path, text: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file atomically, whole or in parts: write a sibling, force it to the disk and rename it."""
    content = text.encode(errors="replace") if isinstance(text, str) else text
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                sync_file(file)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = f"cannot write {path}: {error.strerror}"
        raise RunFailed(message, code="disk-full" if full else "not-writable", key=str(path)) from error
    with contextlib.suppress(OSError):  # not supported by every file system
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, with null for numbers that are not finite."""
    write_atomic(path, _dump_json(value) + "\n")


def _dump_json(value: Any) -> str:
    return json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, default=to_json_value)


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with a checksum of itself, for values that determine an answer."""
    write_json(path, {**value, SEAL: _compute_own_seal(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote, and verify its checksum. Older files have none."""
    value = read_json(path)
    try:
        seal = _compute_own_seal(value)
    except RecursionError:
        raise _damaged_error(path, "it is nested too deeply") from None
    if value.pop(SEAL, seal) != seal:
        raise _damaged_error(path, "its checksum differs")
    return value


def _damaged_error(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}", code="damaged", key=str(path))


@contextmanager
def catch_damage(path: Path, remedy: str = "") -> Iterator[None]:
    """Report values that this file should not have as one line: the file is damaged, and the remedy."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged_error(path, f"{type(error).__name__} {error}{'; ' * bool(remedy)}{remedy}") from None


def _compute_own_seal(value: Mapping[str, Any]) -> str:
    inside = {name: inner for name, inner in value.items() if name != SEAL}
    return hash_value(json.loads(json.dumps(replace_nonfinite(inside), default=to_json_value)))


def hash_value(value: object) -> str:
    """Return the SHA-256 of JSON values, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_json(value: Any) -> None:
    """Print JSON for other programs, with hidden characters as JSON escapes them."""
    print_text(replace_hidden(_dump_json(value), lambda hidden: json.dumps(hidden)[1:-1]))


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote."""
    try:
        value = json.loads(read_text(path), parse_int=_parse_int, parse_constant=_parse_int)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", code="not-found", key=str(path)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", code="unreadable", key=str(path)) from None
    except json.JSONDecodeError as error:
        raise _damaged_error(path, f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError):
        raise _damaged_error(path, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _damaged_error(path, f"it holds a {type(value).__name__}, not a set of named values")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits[:20]}… is too large")
    return int(digits)


def replace_nonfinite(value: Any) -> Any:
    """Replace every NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(inner) for inner in value]
    if not isinstance(value, (str, bytes, bool, int, float, type(None))):
        return replace_nonfinite(to_json_value(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json_value(value: Any) -> Any:
    """Convert arrays and their scalars to lists and numbers, and anything else to its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def expand_cache(path: Path) -> Path:
    """Return the path of a cache, with `~`; below `~/.cache`, in $XDG_CACHE_HOME if that is set."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home) and path.is_relative_to("~/.cache"):
        return Path(home) / path.relative_to("~/.cache")
    return path.expanduser()


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it lasts through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_flat(record: Any) -> dict[str, Any]:
    """Flatten a dataclass and the dataclasses inside it into one dict."""
    found: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        found |= to_flat(value) if is_dataclass(value) else {field.name: value}
    return found


def flatten_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted keys; an empty section is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flatten_keys(value) if isinstance(value, Mapping) and value else {"": value}
        flat |= {f"{name}.{key}" if key else f"{name}": item for key, item in inner.items()}
    return flat


def from_flat(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from `to_flat`: lists become tuples, unknown keys are ignored, missing ones have defaults."""
    given: dict[str, Any] = {}
    for name, hint in _get_hints(kind).items():
        if isinstance(hint, type) and is_dataclass(hint):
            given[name] = from_flat(hint, values)
        elif name in values:
            is_enum = isinstance(hint, type) and issubclass(hint, Enum)
            given[name] = hint(values[name]) if is_enum else _check_type(hint, _as_tuple(values[name]))
    return kind(**given)


_get_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def validate_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check values of some fields of a dataclass, or raise ValueError; lists become tuples."""
    if not isinstance(values, Mapping):
        raise ValueError(f"it holds a {type(values).__name__}, not a set of named values")
    hints = _get_hints(kind)
    return {name: _check_type(hints[name], _as_tuple(value)) for name, value in values.items()}


def _check_type(hint: Any, value: T) -> T:
    """Return a value of the hinted type, or raise ValueError. Numbers in a table may be missing."""
    known = {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value
    try:
        _get_type_adapter(hint).validate_python(known, strict=True)
    except ValueError:
        raise ValueError(f"{value!r:.60} has the wrong type") from None
    return value


@cache
def _get_type_adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO}


@contextmanager
def hold_lock(file: Path, on_wait: Callable[[], None], timeout_s: float = -1) -> Iterator[int | None]:
    """Hold an exclusive lock, and yield its descriptor; None if there are no locks, as on some network file systems.

    A process that inherits the descriptor holds it too. Calls `on_wait` once if another process holds it. Raises
    TimeoutError after `timeout_s` (never, if negative), and another OSError if the file cannot be opened.
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
        yield lock._context.lock_file_fd
    finally:
        lock.release()


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading bytes; raise OSError if it is not a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(handle).st_mode, path)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """Raise OSError if a file that a library opens by name is not a regular file."""
    _require_regular(path.stat().st_mode, path)


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a whole file; raise OSError if it is longer than `most`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)  # allocates as much, whatever the file holds
        if len(content) > size:  # it grew, or its file system reports no size
            content += file.read(max(0, most + 1 - len(content)))
        if max(size, len(content)) > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return content


def read_text(path: Path, most: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Read a whole text file."""
    return read_bytes(path, most).decode(encoding)


def explain_unreadable(file: Path, error: Exception) -> tuple[Code, str]:
    """Return the code and the predicate of the message for a text file that a user named and that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return "not-found", f"does not exist{suggest_path(file)}"
    if isinstance(error, UnicodeDecodeError):
        return "invalid-format", "is not a text in UTF-8"
    if isinstance(error, IsADirectoryError):
        is_run = (file / "spec.yaml").is_file()
        return "unreadable", "is a folder" + (
            f"; to resume this run:  paceline train --resume {file}" if is_run else ""
        )
    return "unreadable", f"cannot be read: {getattr(error, 'strerror', '') or error}"


def _require_regular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
