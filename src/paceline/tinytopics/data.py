"""Rows of a matrix as torch datasets: from memory, or from a file that stays on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class IndexTrackingDataset(Dataset):
    """Another dataset whose samples are (row, number of the row), so that they keep their numbers when shuffled."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.is_tensor = isinstance(dataset, Tensor)
        shape = getattr(dataset, "shape", None)
        self.shape: tuple[int, ...] = (len(dataset), len(dataset[0])) if shape is None else tuple(shape)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.dataset[idx], torch.tensor(idx)


class MatrixRows(Dataset):
    """Rows of a matrix: those that `indices` names, else all. `shape` is that of the whole matrix."""

    shape: tuple[int, ...]
    data_path: Path | None
    indices: Sequence[int]

    def _choose(self, indices: Sequence[int] | None) -> None:
        self.indices = range(self.shape[0]) if indices is None or len(indices) == 0 else indices

    @property
    def all_rows(self) -> bool:
        return isinstance(self.indices, range) and self.indices == range(self.shape[0])

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_terms(self) -> int:
        """Columns of the matrix."""
        return self.shape[1]


class NumpyDiskDataset(MatrixRows):
    """Rows as float32 tensors, of an array or of a .npy file, which is mapped when the first row is asked for."""

    def __init__(self, data: str | Path | np.ndarray, indices: Sequence[int] | None = None) -> None:
        self.mmap_data: np.ndarray | None = None
        if isinstance(data, str | Path):
            self.data_path = require_data_file(data)
            self.shape = tuple(np.load(self.data_path, mmap_mode="r").shape)
        else:
            self.data_path, self.data, self.shape = None, data, tuple(data.shape)
        self._choose(indices)

    def __getitem__(self, idx: int) -> Tensor:
        return torch.tensor(self._matrix()[self.indices[idx]], dtype=torch.float32)

    def _matrix(self) -> np.ndarray:
        if self.data_path is None:
            return self.data
        if self.mmap_data is None:
            self.mmap_data = np.load(self.data_path, mmap_mode="r")
        return self.mmap_data

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the file for itself, instead of being sent its contents."""
        return {**self.__dict__, "mmap_data": None}


class TorchDiskDataset(MatrixRows):
    """Rows of the one tensor in a file of torch.save, in its type. The file is mapped where its format allows it."""

    data_path: Path

    def __init__(self, data: str | Path, indices: Sequence[int] | None = None) -> None:
        self.data_path = require_data_file(data)
        self.mmap_data: Tensor | None = None
        try:
            self.shape = tuple(self._loaded(mmap=True).shape)
            self.mmap_supported = True
        except RuntimeError:  # the format of torch before 1.6
            self.data = self._loaded(mmap=False)
            self.shape = tuple(self.data.shape)
            self.mmap_supported = False
        self._choose(indices)

    def __getitem__(self, idx: int) -> Tensor:
        return self._matrix()[self.indices[idx]]

    def _matrix(self) -> Tensor:
        if not self.mmap_supported:
            return self.data
        if self.mmap_data is None:
            self.mmap_data = self._loaded(mmap=True)
        return self.mmap_data

    def _loaded(self, mmap: bool) -> Tensor:
        found = torch.load(self.data_path, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(found, Tensor):
            raise ValueError(f"{self.data_path} must contain a single tensor, and holds a {type(found).__name__}")
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mmap_data": None}


def require_data_file(path: str | Path) -> Path:
    if not Path(path).exists():
        raise FileNotFoundError(f"Data file not found: {path}")
    return Path(path)
