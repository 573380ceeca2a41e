"""Rows of a matrix as torch datasets: from memory, or from a file that stays on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.files import invalid_format
from paceline.errors import InvalidData, InvalidValue, get_first_line
from paceline.workloads.topics.counts.matrices import Counts, check_matrix
from paceline.workloads.topics.files.disk_counts import MappedCounts
from paceline.workloads.topics.files.reading import read_counts


class MatrixRows(Dataset[Tensor]):
    """Rows of a matrix: those that `indices` names, else all. `shape` is that of the whole matrix.

    A file is mapped when its first row is read.
    """

    def __init__(self, data: str | Path | np.ndarray, indices: Sequence[int] | None = None) -> None:
        self.data_path: Any = None
        self.data: Any = None  # in memory
        self.mmap_data: Any = None
        if isinstance(data, str | Path):
            self.data_path = Path(data).expanduser()
            if not self.data_path.exists():
                raise FileNotFoundError(f"Data file not found: {self.data_path}")
            self.shape = tuple(self._map_file().shape)
        else:
            self.data, self.shape = data, tuple(data.shape)
        rows = self.shape[0]
        self.indices: Sequence[int] = range(rows) if indices is None or len(indices) == 0 else indices
        if rows and not -rows <= (low := min(self.indices)) <= (high := max(self.indices)) < rows:
            raise InvalidValue(f"indices from {low} to {high}: the matrix has {rows:,} rows, from 0")

    @property
    def all_rows(self) -> bool:
        return isinstance(self.indices, range) and self.indices == range(self.shape[0])

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_terms(self) -> int:
        return self.shape[1]

    def as_counts(self, *, fractional: bool = False) -> Counts:
        """Return the counts for `fit`. Chosen rows are read into memory."""
        matrix = self._open_matrix()
        return read_counts(matrix if self.all_rows else matrix[list(self.indices)], fractional=fractional)

    def _open_matrix(self) -> Any:
        if self.data is None and self.mmap_data is None:
            self.mmap_data = self._map_file()
        return self.mmap_data if self.data is None else self.data

    def _map_file(self) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the contents: a worker process maps the file itself."""
        return {**self.__dict__, "mmap_data": None}


class NumpyDiskDataset(MatrixRows):
    """Rows as float32 tensors, of an array or of a .npy file."""

    def __getitem__(self, idx: int) -> Tensor:
        return torch.tensor(self._open_matrix()[self.indices[idx]], dtype=torch.float32)

    def _map_file(self) -> np.ndarray:
        return np.load(self.data_path, mmap_mode="r")


class TorchDiskDataset(MatrixRows):
    """Rows of the one tensor in a file of torch.save, in its type."""

    def __getitem__(self, idx: int) -> Tensor:
        return self._open_matrix()[self.indices[idx]]

    def _map_file(self) -> Tensor:
        try:
            found = torch.load(self.data_path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise invalid_format(f"{self.data_path}: no tensor of torch.save ({get_first_line(error):.200})") from None
        if not isinstance(found, Tensor):
            raise InvalidData(f"{self.data_path} must contain a single tensor, and holds a {type(found).__name__}")
        return found

    def as_counts(self, *, fractional: bool = False) -> Counts:
        tensor = self._open_matrix()
        of_two_bytes = tensor.is_floating_point() and tensor.dtype.itemsize == 2  # numpy has no bfloat16
        if not self.all_rows or of_two_bytes or tensor.layout != torch.strided:
            return super().as_counts(fractional=fractional)
        array = tensor.numpy()
        check_matrix(array.shape, str(self.data_path), array.dtype)
        return MappedCounts(array, str(self.data_path), fractional=fractional)
