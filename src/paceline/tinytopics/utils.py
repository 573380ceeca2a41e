"""Seeds, synthetic counts, and the orders of topics and documents in pictures. Named as in tinytopics."""

# ruff: noqa: NPY002 (programs seed numpy's global generator, by `set_random_seed` or themselves)
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from paceline.workloads.topics.result import model


def set_random_seed(seed: int) -> None:
    """Seed the generators of torch, on all devices, and of numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def generate_synthetic_data(
    n: int, m: int, k: int, avg_doc_length: int = 1000, device: torch.device | None = None
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return (X, L, F): float32 counts X (n, m) of documents of Poisson length with term distributions L F.

    After the same seed the numbers are those of tinytopics.
    """
    true_L = np.random.dirichlet(np.ones(k), n)
    true_F = np.random.dirichlet(np.ones(m), k)
    lengths: np.ndarray = np.random.poisson(avg_doc_length, (n,))
    counts = np.empty((n, m), np.float32)
    for at in tqdm(range(n), desc="Generating Documents"):
        counts[at] = np.random.multinomial(lengths[at], true_L[at] @ true_F)
    return torch.from_numpy(counts).to(device or "cpu"), true_L, true_F


def align_topics(true_F: Any, learned_F: Any) -> np.ndarray:
    """Return for each true topic the number of the learned one that matches, by the largest sum of cosines."""
    return model.align_topics(learned_F, true_F).order[: len(true_F)]


def sort_documents(L_matrix: Any) -> Sequence[int]:
    """Return the numbers of the documents by leading topic, those with the largest share of it first."""
    rows = np.asarray(L_matrix, np.float64)
    topic = rows.argmax(axis=1)
    share = rows.max(axis=1) / np.maximum(rows.sum(axis=1), np.finfo(np.float64).tiny)
    return np.lexsort((-share, topic)).tolist()
