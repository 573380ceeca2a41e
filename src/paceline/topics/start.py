"""Where a fit begins: topics of a sample of the documents, found by least squares or as the best of several tries.

The sample is a function of the documents and the seed alone, so that every number of ranks begins at the same topics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.topics.blocks import Counts, Csr, DenseCounts, SparseCounts, dense_rows, joined, stacked
from paceline.topics.device import Pass
from paceline.topics.engine import Fit
from paceline.topics.rows import cpu_pass
from paceline.topics.start_ls import TINY, least_squares_start, plain_sweeps

Tensor = Any  # torch.Tensor; torch is not typed here
RUNS = 64  # of consecutive documents that a sample is made of
SAMPLE_WORK = 300_000  # nonzeros of a sparse sample
SAMPLE_ROWS = 500  # documents of it, at least
DENSE_WORK = 50_000_000  # counts of a dense sample
TRIES = 2
SURPLUS = 3  # times k documents that a try begins with
FIRST_PASSES, EACH_PASSES, LAST_PASSES = 6, 3, 8
ROW_SWEEPS = 10
MIX = 0.02  # of the average in every topic: no term is ruled out by the sample
STARTS = ("auto", "race", "least_squares", "random")


def random_topics(per_term: Tensor, k: int, seed: int) -> Tensor:
    """F transposed: the terms' shares, each times a random number of its own for every topic."""
    random = torch.Generator().manual_seed(seed)
    Ft = torch.empty(len(per_term), k).exponential_(generator=random) * (per_term.float()[:, None] + 1e-3)
    return Ft / Ft.sum(0)


def first_topics(counts: Counts, per_term: np.ndarray, k: int, *, how: str = "auto", seed: int = 0) -> Tensor:
    """F transposed (terms, k), on the CPU. `how`: "auto" takes least squares for dense counts, a race for sparse."""
    shares = torch.from_numpy(per_term)
    if how == "random":
        return random_topics(shares, k, seed)
    few, terms = _without_unused(sample(counts, seed, least=2 * k))
    dense = how == "least_squares" or (how == "auto" and not few.sparse)
    dense = dense and k <= min(few.documents, few.terms)
    Ft = torch.zeros(counts.terms, k)
    Ft[terms] = _by_least_squares(few, k, seed) if dense else _by_race(few, k, seed)
    return _mixed(Ft, shares)


def first_rows(work: Pass, Ft: Tensor, per_document: Tensor, share: Tensor) -> Tensor:
    """Rows of L for given topics by weighted nonnegative least squares: one read of the documents.

    Documents are k numbers then, their products with the topics, and each row is found from those alone.
    """
    k = Ft.shape[1]
    weighted = Ft / share.clamp_min(TINY)[:, None]
    rows = torch.full((k, len(per_document)), 1 / k, device=Ft.device)
    target = work.multiply(weighted).T / per_document.clamp_min(TINY)
    plain_sweeps(target.contiguous(), Ft.T @ weighted, rows, ROW_SWEEPS)
    size = rows.sum(0)[:, None]
    L = torch.where(size > 0, rows.T / size.clamp_min(TINY), torch.full_like(size, 1 / k))
    return ((1 - MIX) * L + MIX / k).contiguous()


def sample(counts: Counts, seed: int, least: int = 1) -> Counts:
    """Some of the documents, `least` or more, in memory: short runs of them, spread evenly over all."""
    weights = counts.weights()
    mean = max(1.0, float(weights.mean()))
    rows = max(SAMPLE_ROWS, int(SAMPLE_WORK / mean)) if counts.sparse else int(DENSE_WORK / mean)
    rows = max(rows, least)
    if rows >= counts.documents:
        return counts if counts.resident else _in_memory([counts.block(0, counts.documents).values], counts.terms)
    runs = min(RUNS, rows)
    length = -(-rows // runs)
    stride = counts.documents / runs
    offset = np.random.default_rng(seed).random() * max(0.0, stride - length)
    starts = [int(i * stride + offset) for i in range(runs)]
    return _in_memory([counts.block(at, min(at + length, counts.documents)).values for at in starts], counts.terms)


def _in_memory(parts: list[np.ndarray | Csr], terms: int) -> Counts:
    if all(isinstance(values, Csr) for values in parts):
        return SparseCounts(joined([values for values in parts if isinstance(values, Csr)]), terms)
    return DenseCounts(stacked([dense_rows(v, terms) if isinstance(v, Csr) else v for v in parts]))


def _by_least_squares(few: Counts, k: int, seed: int) -> Tensor:
    per_document, per_term = _sums(few)
    work = cpu_pass(few.block(0, few.documents), per_term)
    _, Ft = least_squares_start(
        work.multiply, work.multiply_t, few.documents, few.terms, k, per_document, per_term, seed=seed
    )
    return Ft


def _by_race(few: Counts, k: int, seed: int) -> Tensor:
    """The best of several tries.

    Each begins with more topics than asked for, every one of them a document half mixed with the average, and drops
    those that the fewest words belong to, half of the surplus at a time: what is left has taken over their words.
    Better optima are found so than from k random topics, in the time of a few passes over the sample.
    """
    per_document, per_term = _sums(few)
    work = cpu_pass(few.block(0, few.documents), per_term)
    whole = [(0, few.documents, work)]
    fits = []
    for number in range(TRIES):
        fit = Fit(lambda: whole, *_documents_as_topics(few, SURPLUS * k, 1000 * seed + number), accelerate=False)
        _passes(fit, FIRST_PASSES)
        while (surplus := fit.L.shape[1] - k) > 0:
            left = surplus // 2
            fit = Fit(lambda: whole, *_largest(*fit.result(), per_document, k + left), accelerate=not left)
            _passes(fit, EACH_PASSES if left else LAST_PASSES)
        fits.append(fit)
    return min(fits, key=lambda fit: min(fit.losses)).result()[1]


def _documents_as_topics(few: Counts, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """L, the same for every document, and F transposed: k of the longer documents, each mixed with the average."""
    per_document, per_term = _sums(few)
    share = (per_term / per_term.sum()).float()
    length = per_document.numpy()
    longer = np.flatnonzero(length >= np.median(length[length > 0]))
    chosen = np.random.default_rng(seed).choice(longer, k, replace=len(longer) < k)
    Ft = torch.stack([_row(few, int(at)) / per_document[int(at)].float() for at in chosen], 1)
    return torch.full((few.documents, k), 1 / k), 0.5 * Ft + 0.5 * share[:, None]


def _row(few: Counts, at: int) -> Tensor:
    values = few.block(at, at + 1).values
    if not isinstance(values, Csr):
        return torch.from_numpy(values[0].astype(np.float32))
    row = torch.zeros(few.terms)
    row[torch.from_numpy(values.indices.astype(np.int64))] = torch.from_numpy(values.data.astype(np.float32))
    return row


def _largest(L: Tensor, Ft: Tensor, per_document: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Without the topics that the fewest words belong to."""
    words = per_document.float() @ L
    kept = words.argsort(descending=True)[:k].sort().values
    L = L[:, kept] + 1e-3
    return L / L.sum(1, keepdim=True), Ft[:, kept].contiguous()


def _passes(fit: Fit, count: int) -> None:
    for _ in range(count):
        fit.step()


def _without_unused(few: Counts) -> tuple[Counts, Tensor]:
    """A sparse sample without the terms that it does not use, and the numbers of the others."""
    values = few.block(0, few.documents).values
    if not isinstance(values, Csr):
        return few, torch.arange(few.terms)
    used = np.zeros(few.terms, bool)
    used[values.indices] = True
    terms = np.flatnonzero(used)
    number = (np.cumsum(used) - 1).astype(np.int32)
    return SparseCounts(Csr(values.indptr, number[values.indices], values.data), len(terms)), torch.from_numpy(terms)


def _sums(few: Counts) -> tuple[Tensor, Tensor]:
    values = few.block(0, few.documents).values
    if isinstance(values, Csr):
        sizes = np.diff(values.indptr)
        per_document = np.bincount(np.repeat(np.arange(few.documents), sizes), values.data, few.documents)
        per_term = np.bincount(values.indices, values.data, few.terms)
    else:
        per_document, per_term = (values.sum(axis, dtype=np.float64) for axis in (1, 0))
    return torch.from_numpy(per_document), torch.from_numpy(per_term)


def _mixed(Ft: Tensor, per_term: Tensor) -> Tensor:
    share = (per_term / per_term.sum()).float()
    return Ft * (1 - MIX) + MIX * share[:, None]
