"""Prepared data on disk: an entry is complete or absent, and one process builds it while others wait."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from paceline.data.npz import UNREADABLE
from paceline.errors import RunFailed, UserError
from paceline.io.files import check_regular, hash_value, hold_lock, read_text, sync_file
from paceline.workload import LogFn, ignore_log

Opened = TypeVar("Opened")
ReadEntry = Callable[[Path, bool], Opened]  # (entry, verify); DamagedEntry, or an error of Python's, if it is damaged

RETRIES, RETRY_S = 20, 0.1


class DamagedEntry(Exception):
    """An entry that is incomplete, or not what was written: it is built again."""


def prepare_entry(
    entry: Path, read: ReadEntry[Opened], build: Callable[[Path], None], log: LogFn, verify: bool = True
) -> Opened:
    """Open an entry of the cache; if it is missing or damaged, build it while other processes wait."""
    if (opened := open_entry(entry, read, log, verify)) is not None:
        return opened
    with lock_entry(entry, log):
        if (opened := open_entry(entry, read, verify=verify)) is not None:  # whoever held the lock before built it
            return opened
        with create_entry(entry) as folder:
            build(folder)
        for _ in range(RETRIES):  # without locks another process may be replacing it with its own, which is equal
            if (opened := open_entry(entry, read, verify=False)) is not None:
                return opened
            time.sleep(RETRY_S)
    raise RunFailed(f"{entry}: was built, but cannot be read", code="damaged")


def open_entry(entry: Path, read: ReadEntry[Opened], log: LogFn = ignore_log, verify: bool = True) -> Opened | None:
    """Return what `read` makes of an entry; None if it is missing or damaged."""
    if not entry.exists():
        return None
    try:
        return read(entry, verify)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DamagedEntry) as damage:
        log(f"the cached {entry} is damaged ({damage}); making it again")
        return None


@contextmanager
def lock_entry(entry: Path, log: LogFn) -> Iterator[None]:
    """Hold an entry's lock and delete what dead processes left; without file locks, two processes may both build it."""
    waiting = f"corpus: another process is preparing {entry.name}; waiting for it"
    with ExitStack() as held:
        with _translate_disk_errors(entry.parent):
            entry.parent.mkdir(parents=True, exist_ok=True)
            if held.enter_context(hold_lock(Path(f"{entry}.lock"), lambda: log(waiting))) is not None:
                # nobody else builds this entry now, so its temporary folders belong to processes that died
                for leftover in entry.parent.glob(f"{entry.name}.part-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def create_entry(entry: Path, key: str = "data.cache") -> Iterator[Path]:
    """Yield a temporary folder beside the entry; at the end it becomes the entry, after an error it is removed.

    Errors of the disk name the option `key`, which chose the place.
    """
    with _translate_disk_errors(entry.parent, key), _make_temporary(entry) as outer:
        new = outer / "new"
        new.mkdir()  # the outer one is private, but a cache may be shared
        yield new
        _replace_folder(new, entry)


def _replace_folder(new: Path, entry: Path) -> None:
    """Rename a folder to the entry; an entry that exists is damaged, or was built meanwhile and is equal."""
    while True:
        try:
            os.rename(new, entry)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        with _make_temporary(entry) as outer, suppress(FileNotFoundError):
            os.rename(entry, outer / "old")


@contextmanager
def _make_temporary(entry: Path) -> Iterator[Path]:
    prefix = f"{entry.name}.part-"
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _translate_disk_errors(folder: Path, key: str = "data.cache") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{key}={folder}: the disk is full; free some space, or type  {key}=FOLDER"
            raise RunFailed(message, code="disk-full", key=key) from None
        message = f"{key}={folder}: cannot be written ({error.strerror or error}); type  {key}=FOLDER"
        raise UserError(message, code="not-writable", key=key) from None


class ArrayWriter:
    """Write a one-dimensional .npy file piece by piece. The header is rewritten when the length is known."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.facts: dict[str, Any] = {}
        self._sha256 = hashlib.sha256()
        self._file = path.open("wb")
        self._write_header()
        self._header_bytes = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        piece = np.ascontiguousarray(values, self.dtype).data
        self._file.write(piece)
        self._sha256.update(piece)
        self.length += len(values)

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file as file:
            if kind is None:
                size = file.tell()
                file.seek(0)
                self._write_header()
                assert file.tell() == self._header_bytes, "numpy leaves room in the header for any length"
                sync_file(file)
                self.facts = {"bytes": size, "sha256": self._sha256.hexdigest(), "dtype": self.dtype.str}

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self._file, header)


def map_array(path: Path) -> NDArray[Any]:
    """Map a .npy file into memory, read-only. It is a plain array, because indexing `np.memmap` is slower."""
    check_regular(path)
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except UNREADABLE as error:
        raise DamagedEntry(f"{path.name}: {type(error).__name__}: {error}") from None


def write_synced(path: Path, content: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(content)
        sync_file(file)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


_verified: set[tuple[object, ...]] = set()


def verify_entry(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DamagedEntry if a file does not match its facts, once per process and state."""
    stats = [(folder / name).stat() for name in files]
    state = (folder, *((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats))
    if state in _verified:
        return
    # Not in the threads: numpy parses a header as Python, and Python 3.11 fails if two threads parse at a time.
    mapped = {name: map_array(folder / name) for name in files if name.endswith(".npy")}
    for name, array in mapped.items():
        if array.dtype.str != files[name].get("dtype", array.dtype.str):
            raise DamagedEntry(f"{name} was changed: its numbers are of another type")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = pool.map(lambda name: _hash_entry_file(folder / name, mapped.get(name)), files)
        for (name, facts), found in zip(files.items(), sums, strict=True):
            if found != facts["sha256"]:
                raise DamagedEntry(f"{name} was changed: its checksum differs")
    _verified.add(state)


def _hash_entry_file(path: Path, array: NDArray[Any] | None) -> str:
    if array is not None:
        return hashlib.sha256(array.data).hexdigest()
    check_regular(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe_array(path: Path) -> dict[str, Any]:
    array = map_array(path)
    return {"bytes": path.stat().st_size, "sha256": _hash_entry_file(path, array), "dtype": array.dtype.str}


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of an entry with their seal."""
    plain = json.loads(json.dumps(facts))
    write_synced(path, json.dumps({**plain, "seal": hash_value(plain)}, indent=1, ensure_ascii=False).encode())


def read_facts(path: Path, verify: bool = False) -> dict[str, Any]:
    """Read the facts of an entry; DamagedEntry if they or, with `verify`, its files were changed."""
    try:
        facts = json.loads(read_text(path))
        if not isinstance(facts, dict) or facts.pop("seal", None) != hash_value(facts):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise DamagedEntry(f"{path.name} was changed") from None
    if verify:
        verify_entry(path.parent, facts["files"])
    return facts
