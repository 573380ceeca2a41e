"""What `fit_model` is given, as the engine reads counts: tensors, datasets, and all that `paceline.topics` reads."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import UserError
from paceline.tinytopics.data import MatrixRows, NumpyDiskDataset
from paceline.workloads.topics.counts.matrices import (
    Counts,
    DenseCounts,
    DocumentBlock,
    LabelledCounts,
    SparseCounts,
    convert_to_smallest,
    make_row_locator,
)
from paceline.workloads.topics.counts.stream import drop_zeros_if_sparse
from paceline.workloads.topics.files.disk_counts import read_npy
from paceline.workloads.topics.files.reading import TorchDiskDataset as TorchFile
from paceline.workloads.topics.files.reading import read_counts

SMALL_BYTES, MEMORY_SHARE = 256 << 20, 1 / 8
"""Of datasets, as float32: up to so much, or so much of the machine's memory for all ranks, is read once and kept."""


def open_counts(X: Any, *, on_device: bool = False, ranks: int = 1) -> Counts:
    """Numbers of any kind from 0 up. `on_device`: a tensor of a GPU stays there."""
    counts = _dataset(X) if isinstance(X, Dataset) else read_counts(X, fractional=True, on_device=on_device)
    kept_bytes = max(SMALL_BYTES, MEMORY_SHARE * psutil.virtual_memory().total / ranks)
    if not counts.resident and 4 * counts.documents * counts.terms <= kept_bytes:
        values: Any = counts.block(0, counts.documents).values
        counts = DenseCounts(values, fractional=True)
    if isinstance(counts, DenseCounts):
        few = drop_zeros_if_sparse(counts.block(0, counts.documents)).values
        if not isinstance(few, np.ndarray):
            return SparseCounts(few, counts.terms, fractional=True)
    return counts


def _dataset(X: Any) -> Counts:
    if isinstance(X, MatrixRows) and X.all_rows and X.data_path is not None:  # read in blocks, not row by row
        if isinstance(X, NumpyDiskDataset):
            return read_npy(X.data_path, fractional=True)
        if X.mmap_supported:  # type: ignore[attr-defined]
            return TorchFile(X.data_path).as_counts(fractional=True)
    if isinstance(X, NumpyDiskDataset) and X.all_rows:
        return read_counts(X.data, fractional=True)
    return DatasetCounts(X, fractional=True)


@dataclass(frozen=True, eq=False)
class DatasetCounts(LabelledCounts):
    """The rows of any dataset with a length, one after the other."""

    dataset: Any

    sparse = False
    resident = False

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no length: an epoch needs to know its documents")
        if not len(self.dataset):
            raise UserError(f"{type(self.dataset).__name__} is empty: give at least one document")

    @property
    def documents(self) -> int:
        return len(self.dataset)

    @property
    def terms(self) -> int:
        known = getattr(self.dataset, "num_terms", None)
        return len(self._row(0)) if known is None else known

    @property
    def stored_bytes(self) -> int:
        return 4 * self.documents * self.terms

    def block(self, start: int, stop: int) -> DocumentBlock:
        rows = np.stack([self._row(at) for at in range(start, stop)])
        place = make_row_locator(type(self.dataset).__name__, rows.shape[1], start)
        return DocumentBlock(start, convert_to_smallest(rows, fractional=True, place=place))

    def _row(self, at: int) -> np.ndarray:
        row = self.dataset[at]
        row = row[0] if isinstance(row, tuple) else row  # (row, number)
        return row.detach().cpu().float().numpy() if isinstance(row, Tensor) else np.asarray(row)


def choose_engine_device(device: torch.device) -> torch.device:
    """Where passes run for a model that shall be on this device."""
    return device if device.type == "cuda" else torch.device("cpu")
