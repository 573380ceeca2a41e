"""Datasets of rows, and what `fit_model` is given as the counts that the engine reads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import (
    Counts,
    DenseCounts,
    DocumentBlock,
    SparseCounts,
    convert_to_smallest,
    make_row_locator,
)
from paceline.workloads.topics.counts.stream import drop_zeros_if_sparse
from paceline.workloads.topics.files.datasets import MatrixRows, NumpyDiskDataset, TorchDiskDataset
from paceline.workloads.topics.files.reading import read_counts

__all__ = ["IndexTrackingDataset", "NumpyDiskDataset", "TorchDiskDataset"]

SMALL_BYTES, MEMORY_SHARE = 256 << 20, 1 / 8
"""Bytes, or share of the machine's memory for all ranks, up to which datasets are kept, by their size as float32."""


class IndexTrackingDataset(Dataset[tuple[Tensor, Tensor]]):
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


def open_counts(X: Any, *, on_device: bool = False, ranks: int = 1) -> Counts:
    """Return the counts in X, numbers of any kind from 0 up. `on_device`: a tensor on a GPU stays there."""
    if not isinstance(X, Dataset):
        counts = read_counts(X, fractional=True, on_device=on_device)
    elif not isinstance(X, MatrixRows) or not X.all_rows:
        counts = DatasetCounts(X, fractional=True)
    else:
        counts = X.as_counts(fractional=True)
    kept_bytes = max(SMALL_BYTES, MEMORY_SHARE * psutil.virtual_memory().total / ranks)
    if not counts.resident and 4 * counts.documents * counts.terms <= kept_bytes:
        values: Any = counts.block(0, counts.documents).values
        counts = DenseCounts(values, fractional=True)
    if isinstance(counts, DenseCounts):
        few = drop_zeros_if_sparse(counts.block(0, counts.documents)).values
        if not isinstance(few, np.ndarray):
            return SparseCounts(few, counts.terms, fractional=True)
    return counts


@dataclass(frozen=True, eq=False)
class DatasetCounts(Counts):
    """The rows of any dataset with a length, read one after the other."""

    dataset: Any

    sparse = False
    resident = False

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise UserError(f"{type(self.dataset).__name__} is empty: give at least one document")

    @property
    def documents(self) -> int:
        return len(self.dataset)

    @property
    def terms(self) -> int:
        known = getattr(self.dataset, "num_terms", None)
        return len(self._read_row(0)) if known is None else known

    @property
    def stored_bytes(self) -> int:
        return 4 * self.documents * self.terms

    def block(self, start: int, stop: int) -> DocumentBlock:
        rows = np.stack([self._read_row(at) for at in range(start, stop)])
        place = make_row_locator(type(self.dataset).__name__, rows.shape[1], start)
        return DocumentBlock(start, convert_to_smallest(rows, fractional=True, place=place))

    def _read_row(self, at: int) -> np.ndarray:
        row = self.dataset[at]
        row = row[0] if isinstance(row, tuple) else row  # (row, number)
        return row.detach().cpu().float().numpy() if isinstance(row, Tensor) else np.asarray(row)
