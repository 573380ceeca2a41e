"""Draw counts from known topics, dense ones and sparse ones that resemble text; and the loss by its definition."""

import math
from typing import Any

import numpy as np

from paceline.errors import InvalidValue
from paceline.workloads.topics.counts.matrices import Csr, SparseCounts, count_keys, find_integer_type, join_rows
from paceline.workloads.topics.counts.stream import cut_by_size

BLOCK_ENTRIES = 1 << 24  # expectations in memory at a time
EXACT_BYTES = 4 << 20
TINIEST = float(np.finfo(np.float64).tiny)
BLOCK_WORDS = 1 << 20  # they stay in the cache
SPREAD = 0.6  # of the logarithm of the length of text-like documents
SHORTEST = 5  # words of a text-like document


def generate_synthetic_data(
    n: int,
    m: int,
    k: int,
    avg_doc_length: float = 1000,
    seed: int = 0,
    device: Any = None,
    sparse: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Return (X, L, F): counts X (n, m) with expectation avg_doc_length * L F; rows of L and F sum to one.

    Without a device these are arrays, X of uint8 or, where a count needs it, uint16 or int32; with `sparse`, X is a
    scipy CSR array, as it is by default where less than a tenth of it is not zero. On a CUDA device they are tensors.
    """
    _check_sizes(n=n, m=m, k=k, avg_doc_length=avg_doc_length)
    rng = np.random.default_rng(seed)
    loadings = _normalise_rows(rng.standard_exponential((n, k), np.float32))
    factors = _normalise_rows(rng.standard_exponential((k, m), np.float32))
    if sparse is None:
        sparse = avg_doc_length < 0.1 * m
    draw = _draw_sparse if sparse else _draw_dense
    return _move_to_device(draw(rng, loadings, factors, avg_doc_length), loadings, factors, device)


def zipf_documents(
    n: int,
    m: int,
    k: int,
    avg_doc_length: float = 160,
    seed: int = 0,
    device: Any = None,
    topics_per_document: float = 2.0,
) -> tuple[Any, Any, Any]:
    """Return (X, L, F): sparse counts like those of texts.

    Terms follow Zipf's law; frequent ones are shared by all topics, rare ones belong to few. X is SparseCounts, which
    `fit` takes, or on a CUDA device a sparse CSR tensor.
    """
    _check_sizes(n=n, m=m, k=k, avg_doc_length=avg_doc_length)
    rng = np.random.default_rng(seed)
    factors = _draw_zipf_topics(rng, k, m)
    loadings = _normalise_rows(rng.standard_gamma(topics_per_document / k, (n, k), np.float32) + np.float32(1e-9))
    drawn = _draw_rows(rng, loadings, factors, _draw_lengths(rng, n, avg_doc_length))
    return _move_to_device(SparseCounts(drawn, m), loadings, factors, device)


def _check_sizes(**sizes: float) -> None:
    for name, value in sizes.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidValue(f"{name}={value}: give a number above 0", key=name)


def _normalise_rows(rows: np.ndarray) -> np.ndarray:
    rows /= rows.sum(axis=1, keepdims=True)
    return rows


def _draw_dense(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, length: float) -> np.ndarray:
    n, m = len(loadings), factors.shape[1]
    counts = np.empty((n, m), np.uint8)
    rows = max(1, BLOCK_ENTRIES // m)
    for start in range(0, n, rows):
        drawn = rng.poisson(length * (loadings[start : start + rows] @ factors))
        kind = find_integer_type(drawn.max())
        if kind is None:
            message = f"avg_doc_length={length:g} gives counts above 2,147,483,647; use a smaller one"
            raise InvalidValue(message, key="avg_doc_length")
        if kind.itemsize > counts.itemsize:
            counts = counts.astype(kind)
        counts[start : start + rows] = drawn
    return counts


def _draw_sparse(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, length: float) -> Any:
    import scipy.sparse

    drawn = _draw_rows(rng, loadings, factors, rng.poisson(length, len(loadings)))
    shape = len(loadings), factors.shape[1]
    return scipy.sparse.csr_array((drawn.data, drawn.indices, drawn.indptr), shape=shape)


def _draw_rows(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, lengths: np.ndarray) -> Csr:
    slots = np.stack([_compute_cumulative_shares(row) for row in factors])
    ranges = cut_by_size(np.cumsum(lengths), BLOCK_WORDS)
    return join_rows([_draw_documents(rng, loadings[a:b], lengths[a:b], factors, slots) for a, b in ranges])


def _draw_lengths(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    drawn = np.exp(rng.standard_normal(n) * SPREAD - SPREAD**2 / 2) * mean
    return np.maximum(np.rint(drawn), min(SHORTEST, mean)).astype(np.int64)


def _draw_zipf_topics(rng: np.random.Generator, k: int, m: int) -> np.ndarray:
    common = 1.0 / (np.arange(m) + 2.7) ** 1.05
    common /= common.sum()
    factors = rng.standard_gamma(np.maximum(0.05 * m * common, 1e-3), (k, m))
    return _normalise_rows(np.maximum(factors, 1e-12).astype(np.float32))


def _compute_cumulative_shares(weights: np.ndarray) -> np.ndarray:
    return np.cumsum(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)


def _draw_documents(
    rng: np.random.Generator, loadings: np.ndarray, lengths: np.ndarray, factors: np.ndarray, cumulative: np.ndarray
) -> Csr:
    n, m = len(loadings), factors.shape[1]
    of_topic = rng.multinomial(
        lengths, loadings.astype(np.float64) / loadings.sum(axis=1, keepdims=True, dtype=np.float64)
    )
    keys = np.empty(int(lengths.sum()), np.int64)
    at = 0
    for topic in range(len(factors)):
        words = int(of_topic[:, topic].sum())
        drawn = np.sort(rng.random(words))  # sorted numbers are found by one walk through the cumulative sums
        terms = np.minimum(np.searchsorted(cumulative[topic], drawn, "right"), m - 1)
        rng.shuffle(terms)
        keys[at : at + words] = np.repeat(np.arange(n, dtype=np.int64) * m, of_topic[:, topic]) + terms
        at += words
    return count_keys(keys, n, m)


def _move_to_device(counts: Any, loadings: np.ndarray, factors: np.ndarray, device: Any) -> tuple[Any, Any, Any]:
    """Return all three on the device; sparse counts, of scipy or Csr, as a sparse CSR tensor."""
    if device is None or str(device) == "cpu":
        return counts, loadings, factors
    import torch

    L, F = (torch.from_numpy(part).to(device) for part in (loadings, factors))
    if isinstance(counts, np.ndarray):
        wide = counts.astype(np.int32) if counts.itemsize == 2 else counts  # torch has little arithmetic for uint16
        return torch.from_numpy(wide).to(device), L, F
    parts = getattr(counts, "values", counts)
    csr = torch.sparse_csr_tensor(parts.indptr, parts.indices, parts.data, size=(len(loadings), factors.shape[1]))
    return csr.to(device), L, F


def exact_loss(X: Any, L: np.ndarray, F: np.ndarray, *, fractional: bool = False) -> float:
    """Return the loss, sum(LF - X log LF), in float64; on the device of X, if it is a CUDA tensor."""
    import torch

    from paceline.topics import read_counts
    from paceline.workloads.topics.counts.arrays import DeviceCounts
    from paceline.workloads.topics.counts.stream import split_ranges

    counts = read_counts(X, fractional=fractional, on_device=True)
    device = counts.device if isinstance(counts, DeviceCounts) else torch.device("cpu")
    rows, Ft = (torch.as_tensor(part, dtype=torch.float64, device=device) for part in (L, F.T))
    total = float(rows.sum(0) @ Ft.sum(0))
    for first, last in split_ranges(counts, 0, counts.documents, EXACT_BYTES):
        some = rows[first:last]
        if isinstance(counts, DeviceCounts):
            parts = counts.part(first, last).tensors
        else:
            parts = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in counts.block(first, last).parts)
        if len(parts) == 1:
            total -= float((parts[0].double() * (some @ Ft.T).clamp_min_(TINIEST).log_()).sum())
        else:
            row = torch.repeat_interleave(torch.arange(last - first, device=device), parts[0].diff())
            p = (some[row] * Ft[parts[1].long()]).sum(1).clamp_min_(TINIEST)
            total -= float(parts[2].double() @ p.log_())
    return total
