"""Prepared data on disk: entries that appear whole or not at all, and arrays written piece by piece.

One process builds an entry while others wait. Its arrays may be larger than memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from paceline.data.npz import UNREADABLE
from paceline.errors import RunFailed, UserError
from paceline.io.files import compute_seal
from paceline.io.locks import hold_lock
from paceline.io.safe_open import check_regular, read_text
from paceline.launch.environment import detect_rank
from paceline.workload import LogFn

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class DamagedEntry(Exception):
    """An entry that is not whole, or not what was written: it is built again."""


@contextmanager
def lock_entry(entry: Path, say: LogFn) -> Iterator[None]:
    """Hold the lock of an entry, and remove what a process that died left of it.

    Some network file systems have no locks: there, two processes may build the same entry, and one replaces the
    other's by its equal.
    """
    waiting = f"corpus: another process is preparing {entry.name}; waiting for it"
    with ExitStack() as held:
        with _translate_disk_errors(entry.parent):
            entry.parent.mkdir(parents=True, exist_ok=True)
            if held.enter_context(hold_lock(Path(f"{entry}.lock"), lambda: say(waiting))):
                for leftover in entry.parent.glob(f"{entry.name}.part-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def create_entry(entry: Path) -> Iterator[Path]:
    """A temporary folder beside the entry; it becomes the entry at the end, or is removed if there is an error."""
    with _translate_disk_errors(entry.parent), _temporary_beside(entry) as outer:
        new = outer / "new"
        new.mkdir()  # the outer one is private, but a cache may be shared
        yield new
        _rename_into_place(new, entry)


def _rename_into_place(new: Path, entry: Path) -> None:
    """What is in the way is damaged, or was built meanwhile and is equal."""
    while True:
        try:
            os.rename(new, entry)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        with _temporary_beside(entry) as outer, suppress(FileNotFoundError):
            os.rename(entry, outer / "old")


@contextmanager
def _temporary_beside(entry: Path) -> Iterator[Path]:
    prefix = f"{entry.name}.part-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _translate_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunFailed(
                f"data.cache={folder}: the disk is full; free some space, or type  data.cache=FOLDER  with a folder "
                "on a larger disk"
            ) from None
        raise UserError(
            f"data.cache={folder}: cannot be written ({error.strerror or error}); type  data.cache=FOLDER  with a "
            "folder of yours"
        ) from None


class ArrayWriter:
    """A one-dimensional .npy file. Its header is written again at the end, when the length is known."""

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

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file as file:
            if kind is None:
                size = file.tell()
                file.seek(0)
                self._write_header()
                assert file.tell() == self._header_bytes, "numpy leaves room in the header for any length"
                _sync(file)
                self.facts = {"bytes": size, "sha256": self._sha256.hexdigest(), "dtype": self.dtype.str}

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self._file, header)


def map_array(path: Path) -> NDArray[Any]:
    """A .npy file as a read-only array of the page cache. A plain array: indexing `np.memmap` itself is slower."""
    check_regular(path)
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except UNREADABLE as error:
        raise DamagedEntry(f"{path.name}: {type(error).__name__}: {error}") from None


def write_synced(path: Path, content: bytes) -> dict[str, Any]:
    """Write a small file to the disk itself, and say what is in it."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


_verified: set[tuple[object, ...]] = set()
"""What was verified by this process, as it was then."""


def verify_entry(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every file of an entry with its checksum, on all cores and once in a process; `Damaged` names the
    first.

    `files` is what `ArrayWriter` and `write_synced` said of them. For ranks that we start, the process that starts them
    has done it.
    """
    place = detect_rank(os.environ)
    if place is not None and place.launcher == "paceline":
        return
    if strange := [name for name in files if Path(name).name != name]:
        raise DamagedEntry(f"it names a file elsewhere, {strange[0]!r}")
    about = [(folder / name).stat() for name in files]
    state = (folder, *((found.st_size, found.st_mtime_ns, found.st_ino) for found in about))
    if state in _verified:
        return
    # Not in the threads: a header is read as Python, and Python 3.11 fails where two threads parse at a time.
    mapped = {name: map_array(folder / name) for name in files if name.endswith(".npy")}
    for name, array in mapped.items():
        if array.dtype.str != files[name].get("dtype", array.dtype.str):
            raise DamagedEntry(f"{name} is not what was written there: its numbers are of another type")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = pool.map(lambda name: _hash_entry_file(folder / name, mapped.get(name)), files)
        for (name, facts), found in zip(files.items(), sums, strict=True):
            if found != facts["sha256"]:
                raise DamagedEntry(f"{name} is not what was written there: its checksum differs")
    _verified.add(state)


def _hash_entry_file(path: Path, array: NDArray[Any] | None) -> str:
    """Of an array its numbers, whose type is noted beside it; of any other file all of it."""
    if array is not None:
        return hashlib.sha256(array.data).hexdigest()
    check_regular(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe_array(path: Path) -> dict[str, Any]:
    """What `ArrayWriter` says of a file, where it was changed afterwards."""
    array = map_array(path)
    return {"bytes": path.stat().st_size, "sha256": _hash_entry_file(path, array), "dtype": array.dtype.str}


def add_seal(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with a checksum of themselves, for the file that says what is in an entry."""
    return {**facts, "seal": compute_seal(facts)}


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of `sealed` from their file, unless somebody changed them."""
    try:
        facts = json.loads(read_text(path))
        if isinstance(facts, dict) and facts.pop("seal", None) == compute_seal(facts):
            return facts
    except (ValueError, RecursionError):
        pass
    raise DamagedEntry("the file that says what is in it was changed")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
