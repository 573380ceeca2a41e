"""Mixtures for topics that stay as they are, and the exact loss of mixtures and topics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.counts.blocks import Counts, Csr, DocumentBlock, sparse_rows
from paceline.workloads.topics.counts.on_device import DeviceCounts
from paceline.workloads.topics.counts.stream import blocks
from paceline.workloads.topics.device.resident import minus_x_log_p
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.fitting.engine import LEAST
from paceline.workloads.topics.fitting.on_cores import CoreSparsePass, cpu_pass
from paceline.workloads.topics.fitting.start import FEW_SWEEPS, first_rows
from paceline.workloads.topics.sizes import NEWTON_TOPICS

Tensor = Any  # torch.Tensor; torch is not typed here
EM_STEPS = 10  # for one Newton step
EXACT_BYTES = 4 << 20


def documents_given_topics(
    counts: Counts, F: np.ndarray, *, passes: int = 100, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """Mixtures (documents, k) for topics that stay as they are, and the loss.

    Each row ends when a step gains less than `tolerance` of its own loss: it does not depend on the other documents.
    """
    Ft = torch.from_numpy(np.ascontiguousarray(F.T, np.float32)).clamp_min(LEAST)
    L = torch.full((counts.documents, Ft.shape[1]), 1 / Ft.shape[1])
    loss = float(counts.documents)
    for block in blocks(counts):
        loss += rows_for_topics(block, L[block.start : block.stop], Ft, passes, tolerance)
    return L.numpy(), loss


def rows_for_topics(block: DocumentBlock, L: Tensor, Ft: Tensor, steps: int, tolerance: float) -> float:
    """Rows of L, in place, for topics that stay; returns the sum of -x log p."""
    nonzeros = DocumentBlock(block.start, sparse_rows(block.values))
    work, share = cpu_pass(nonzeros, Ft[:, 0]), Ft.mean(1)
    L.copy_(first_rows(work, Ft, work.multiply(torch.ones(len(Ft), 1))[:, 0], share, FEW_SWEEPS))
    if isinstance(work, CoreSparsePass) and L.shape[1] <= NEWTON_TOPICS:
        return work.solve(L, Ft, steps, tolerance)
    unused = torch.zeros_like(Ft)
    for _ in range(EM_STEPS * steps):
        before = L.clone()
        work(L, Ft, unused, rows="em", loss=False)
        if float((L - before).abs().max()) <= tolerance:
            break
    return float(work(L.clone(), Ft, unused, rows="em"))


def exact_loss(X: Any, L: np.ndarray, F: np.ndarray, *, fractional: bool = False) -> float:
    """The loss, sum(LF - X log LF), in float64."""
    counts = read_counts(X, fractional=fractional, on_device=True)
    total = float(L.sum(0, dtype=np.float64) @ F.sum(1, dtype=np.float64))
    if isinstance(counts, DeviceCounts):
        return total + minus_x_log_p(counts, L, F)
    Ft = np.ascontiguousarray(F.T, np.float64)
    for block in blocks(counts, block_bytes=EXACT_BYTES):
        rows, values = L[block.start : block.stop].astype(np.float64), block.values
        if isinstance(values, Csr):
            p = np.einsum("ek,ek->e", rows[values.row_numbers], Ft[values.indices])
            total -= float(values.data @ np.log(np.maximum(p, np.finfo(float).tiny)))
        else:
            p = rows @ Ft.T
            total -= float((values * np.log(np.maximum(p, np.finfo(float).tiny))).sum())
    return total
