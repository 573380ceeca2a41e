"""Matrices in files under the names that users of other tools know. `fit` and `read_counts` take them."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts, dense_rows
from paceline.workloads.topics.counts.dtypes import check_dtype, check_shape
from paceline.workloads.topics.files.npy import MappedCounts, NpyCounts
from paceline.workloads.topics.files.reading import first_line, read_counts

LOCAL_HEADER_BYTES = 30  # of an entry of a zip file, before its name


class NumpyDiskDataset:
    """Rows of a .npy file or an array. A file stays on disk. `dataset[i]` is (row as a float32 tensor, i)."""

    def __init__(self, data: str | Path | np.ndarray, indices: Any = None):
        self.counts: Counts = self._open(data)
        self.indices = None if indices is None else np.asarray(indices, np.int64)
        if self.indices is not None and self.indices.size:
            low, high = int(self.indices.min()), int(self.indices.max())
            if low < 0 or high >= self.counts.documents:
                raise UserError(f"indices from {low} to {high}: the matrix has {self.counts.documents:,} rows, from 0")

    def _open(self, data: Any) -> Counts:
        return read_counts(data, fractional=True)

    def __len__(self) -> int:
        return self.counts.documents if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> Any:
        import torch

        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        return torch.from_numpy(self._row(index).astype(np.float32)), index

    @property
    def num_terms(self) -> int:
        return self.counts.terms

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.counts.terms

    def as_counts(self, *, fractional: bool = False) -> Counts:
        """The counts for `fit`. Chosen rows are brought into memory."""
        if self.indices is not None:
            return read_counts(np.stack([self._row(at) for at in range(len(self))]), fractional=fractional)
        changeable: Any = self.counts
        if self.counts.resident and not fractional:
            return read_counts(changeable.values, fractional=False)
        return replace(changeable, fractional=fractional)

    def _row(self, index: int) -> np.ndarray:
        row = index if self.indices is None else int(self.indices[index])
        return dense_rows(self.counts.block(row, row + 1).values, self.counts.terms)[0]


class TorchDiskDataset(NumpyDiskDataset):
    """Rows of a dense matrix saved by torch.save. The file stays on disk."""

    def _open(self, data: Any) -> Counts:
        path = Path(data).expanduser()
        tensor = _mapped(path)
        check_shape(tensor.shape, str(path))
        if tensor.dtype.itemsize == 2 and tensor.is_floating_point():  # numpy has no bfloat16
            return read_counts(tensor, fractional=True)
        array = tensor.numpy()
        check_dtype(array.dtype, str(path))
        offset = _offset(path)
        if offset is None or not tensor.is_contiguous():
            return MappedCounts(array, str(path), fractional=True)
        offset += tensor.storage_offset() * array.itemsize
        return NpyCounts(path, array.shape[0], array.shape[1], array.dtype, offset, fractional=True)


def _mapped(path: Path) -> Any:
    import torch

    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except Exception as error:
        raise UserError(f"{path}: not a tensor that torch.save wrote ({first_line(error):.80})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise UserError(f"{path}: holds no dense tensor but a {type(tensor).__name__}; save the matrix alone")
    return tensor


def _offset(path: Path) -> int | None:
    """Where the numbers of the only tensor begin in the zip file that torch.save wrote."""
    with zipfile.ZipFile(path) as archive:
        stored = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(stored) != 1 or stored[0].compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        file.seek(stored[0].header_offset)
        header = file.read(LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return stored[0].header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
