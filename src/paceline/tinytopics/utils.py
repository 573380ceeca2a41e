"""Seeds, synthetic counts, and the orders of topics and documents in pictures. Named as in tinytopics."""

# ruff: noqa: NPY002 (programs seed numpy's global generator, by `set_random_seed` or themselves)
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tqdm.auto import tqdm

from paceline.errors import UserError
from paceline.io.format import size
from paceline.tinytopics.data import NumpyDiskDataset

MEMORY_SHARE = 0.5  # of what is free: larger counts go to a file
NUMBER_BYTES = 4


def set_random_seed(seed: int) -> None:
    """Seed the generators of torch, on all devices, and of numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def generate_synthetic_data(
    n: int, m: int, k: int, avg_doc_length: int = 1000, device: torch.device | None = None
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return (X, L, F): float32 counts X (n, m) of documents of Poisson length with term distributions L F.

    After the same seed the numbers are those of tinytopics. Counts that would fill the memory are in a temporary file.
    """
    needed = n * m * NUMBER_BYTES
    if needed <= MEMORY_SHARE * psutil.virtual_memory().available:
        counts = np.empty((n, m), np.float32)
    else:
        with tempfile.TemporaryFile() as file:
            _reserve(file.fileno(), needed, Path(tempfile.gettempdir()))
            counts = np.frombuffer(mmap.mmap(file.fileno(), needed), np.float32).reshape(n, m)
    true_L, true_F = _draw(counts, k, avg_doc_length)
    return torch.from_numpy(counts).to(device or "cpu"), true_L, true_F


def write_synthetic_data(
    path: str | Path, n: int, m: int, k: int, avg_doc_length: int = 1000
) -> tuple[NumpyDiskDataset, np.ndarray, np.ndarray]:
    """Write the same counts to a .npy file, atomically; they are never all in memory."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        counts = np.lib.format.open_memmap(beside, "w+", np.dtype(np.float32), (n, m))
        with beside.open("r+b") as file:
            _reserve(file.fileno(), beside.stat().st_size, path.parent)
        true_L, true_F = _draw(counts, k, avg_doc_length)
        counts.flush()
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return NumpyDiskDataset(path), true_L, true_F


def _draw(counts: np.ndarray, k: int, avg_doc_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill the counts, document by document; return L and F."""
    n, m = counts.shape
    true_L = np.random.dirichlet(np.ones(k), n)
    true_F = np.random.dirichlet(np.ones(m), k)
    lengths: np.ndarray = np.random.poisson(avg_doc_length, (n,))
    for at in tqdm(range(n), desc="Generating Documents"):
        counts[at] = np.random.multinomial(lengths[at], true_L[at] @ true_F)
    return true_L, true_F


def _reserve(handle: int, needed: int, folder: Path) -> None:
    """Allocate the file now: a mapped file on a full disk would end the process without a word."""
    try:
        os.posix_fallocate(handle, 0, needed)
    except OSError as error:
        message = f"{folder}: {size(needed)} of counts do not fit ({error.strerror}); set TMPDIR to a larger disk"
        raise UserError(message) from None


def align_topics(true_F: Any, learned_F: Any) -> np.ndarray:
    """Return for each true topic the number of the learned one that matches, by the largest sum of cosines."""
    _, matched = linear_sum_assignment(_normalise_rows(true_F) @ _normalise_rows(learned_F).T, maximize=True)
    return matched


def _normalise_rows(rows: Any) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def sort_documents(L_matrix: Any) -> Sequence[int]:
    """Return the numbers of the documents by leading topic, those with the largest share of it first."""
    rows = np.asarray(L_matrix, np.float64)
    topic = rows.argmax(axis=1)
    share = rows.max(axis=1) / np.maximum(rows.sum(axis=1), np.finfo(np.float64).tiny)
    return np.lexsort((-share, topic)).tolist()
