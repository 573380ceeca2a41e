"""Counts brought into memory, as rows or as nonzeros."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.workloads.topics.blocks import (
    Block,
    Counts,
    Csr,
    DenseCounts,
    SparseCounts,
    allows_fractions,
    dense_rows,
    joined,
    sparse_rows,
)
from paceline.workloads.topics.narrow import Filling
from paceline.workloads.topics.sizes import SPARSE_BELOW
from paceline.workloads.topics.stream import blocks

READ_BYTES = 16 << 20
SAMPLES, SAMPLE_ROWS = 8, 32


def sparsified(counts: Counts, memory_bytes: int | None = None) -> Counts:
    """Mostly-zero dense counts as their nonzeros in memory, if those fit; other counts as they are."""
    if counts.sparse:
        return counts
    dense = [np.asarray(values) for values in sampled(counts)]
    share = sum(int(np.count_nonzero(rows)) for rows in dense) / sum(rows.size for rows in dense)
    needed_bytes = 2 * 6 * share * counts.documents * counts.terms  # twice: parts, and then the whole
    if share >= SPARSE_BELOW or needed_bytes > _free_memory(memory_bytes):
        return counts
    return in_memory(counts, sparse=True)


def sampled(counts: Counts) -> list[np.ndarray | Csr]:
    """A few groups of rows from all over the matrix."""
    starts = np.unique(np.linspace(0, max(0, counts.documents - SAMPLE_ROWS), SAMPLES).astype(int)).tolist()
    return [counts.block(at, min(counts.documents, at + SAMPLE_ROWS)).values for at in starts]


def in_memory(counts: Counts, *, sparse: bool | None = None) -> Counts:
    """All of the counts in memory; whether that fits is for the caller to know (`stored_bytes`)."""
    wanted = counts.sparse if sparse is None else sparse
    if counts.resident and wanted == counts.sparse:
        return counts
    facts = {"vocabulary": counts.vocabulary, "names": counts.names, "fractional": allows_fractions(counts)}
    stream = blocks(counts, 0, counts.documents, READ_BYTES)
    if not wanted:
        return DenseCounts(_stacked(stream, counts), **facts)  # type: ignore[arg-type]
    parts = [b.values if isinstance(b.values, Csr) else sparse_rows(b.values) for b in stream]
    return SparseCounts(joined(parts), counts.terms, **facts)  # type: ignore[arg-type]


def _stacked(stream: Iterator[Block], counts: Counts) -> np.ndarray:
    filling = Filling(counts.documents * counts.terms, fractional=True, place=str)
    for block in stream:
        rows = dense_rows(block.values, counts.terms) if isinstance(block.values, Csr) else block.values
        filling.put(rows.ravel())
    return filling.values.reshape(counts.documents, counts.terms)


def _free_memory(memory_bytes: int | None) -> float:
    if memory_bytes is not None:
        return memory_bytes
    import psutil

    return psutil.virtual_memory().available / 2
