"""Counts from whatever holds them: arrays, tensors, sparse matrices, files, folders."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError, did_you_mean
from paceline.workloads.topics.counts.arrays import KINDS, from_array, from_scipy, from_torch
from paceline.workloads.topics.counts.blocks import Counts, allowing_fractions
from paceline.workloads.topics.counts.dtypes import check_dtype, check_shape
from paceline.workloads.topics.files import matrices, npy, parquet, shards
from paceline.workloads.topics.files.documents import is_text
from paceline.workloads.topics.files.texts import TextOptions, read_text

READERS: dict[str, Callable[[Path, bool], Counts]] = {
    ".npy": npy.read_npy,
    ".npz": matrices.read_npz,
    ".mtx": matrices.read_mtx,
    ".parquet": parquet.read_parquet,
}


def read_counts(
    source: Any, *, fractional: bool = False, text: TextOptions | None = None, on_device: bool = False
) -> Counts:
    """Counts from a path, an ndarray, a torch tensor, a scipy sparse matrix or a dataset on disk.

    What is in memory is brought to its smallest exact type at once, and so are the contents of .npz and .mtx files. A
    .npy file, a folder of shards and a Parquet file of counts stay on disk. `text` says how texts are counted.
    `on_device`: a tensor of a device, dense or sparse CSR, is left there; else it is brought to memory.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source).expanduser(), fractional, text)
    if callable(getattr(source, "as_counts", None)):  # the datasets of datasets.py
        return source.as_counts(fractional=fractional)
    if isinstance(source, Counts):
        return allowing_fractions(source) if fractional else source
    if type(source).__module__.partition(".")[0] == "torch":
        return from_torch(source, fractional=fractional, on_device=on_device)
    if type(source).__module__.startswith("scipy.sparse"):
        return from_scipy(source, fractional=fractional)
    if isinstance(source, np.memmap):
        return _from_memmap(source, fractional)
    return from_array(source, fractional=fractional)


def _from_memmap(array: np.memmap, fractional: bool) -> Counts:
    """A whole file that numpy has mapped is read as a file; a part of one through the mapping."""
    source = str(array.filename or "the mapped matrix")
    check_dtype(array.dtype, source)
    check_shape(array.shape, source)
    if isinstance(array.base, mmap.mmap) and array.filename and array.flags.c_contiguous and array.mode != "c":
        path = Path(array.filename)
        return npy.NpyCounts(path, array.shape[0], array.shape[1], array.dtype, array.offset, fractional=fractional)
    return npy.MappedCounts(array, source, fractional=fractional)


def _read_path(path: Path, fractional: bool, options: TextOptions | None) -> Counts:
    try:
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"{path}: there is no such file or folder{did_you_mean(path.name, siblings)}")
        if is_text(path):
            return read_text(path, options)
        if (path / shards.MANIFEST).exists():
            return shards.read_shards(path)
        if path.is_dir():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise UserError(f"{path}: a folder without {shards.MANIFEST} and without .txt files (there: {found})")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    name = path.name.lower().removesuffix(".gz")
    read = next((read for suffix, read in READERS.items() if name.endswith(suffix)), None)
    if read is None:
        raise UserError(f"{path}: a file of this kind is not read; give {KINDS}")
    return read(path, fractional)
