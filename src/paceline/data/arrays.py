"""Arrays that grow on disk: .npy files written piece by piece, so that a corpus may be larger than memory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file as file:
            if kind is None:
                size = file.tell()
                file.seek(0)
                self._write_header()
                assert file.tell() == self._header_bytes, "numpy leaves room in the header for any length"
                _sync(file)
                self.facts = {"bytes": size, "sha256": self._sha256.hexdigest()}

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self._file, header)


def map_array(path: Path) -> NDArray[Any]:
    """A .npy file as a read-only array of the page cache. A plain array: indexing `np.memmap` itself is slower."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def write_synced(path: Path, content: bytes) -> dict[str, Any]:
    """Write a small file to the disk itself, and say what is in it."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
