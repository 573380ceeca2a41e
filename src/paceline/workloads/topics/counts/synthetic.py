"""Draw counts from known topics, for tests and benchmarks: dense ones, and sparse ones that resemble text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import Csr, SparseCounts, count_keys, find_integer_type, join_rows
from paceline.workloads.topics.counts.stream import cut_by_size

BLOCK_ENTRIES = 1 << 24  # expectations in memory at a time, on a CPU
DEVICE_BLOCK_ENTRIES = 1 << 27
BLOCK_WORDS = 1 << 20  # they stay in the cache
DEVICE_BLOCK_WORDS = 1 << 26
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
    scipy CSR array. On a CUDA device they are tensors there, drawn in blocks of rows. The same seed gives the same
    numbers on the same kind of device. By default X is sparse on a CPU where less than a tenth of it is not zero.
    """
    _check_sizes(n=n, m=m, k=k, avg_doc_length=avg_doc_length)
    if device is not None and str(device) != "cpu":
        return _on_device(n, m, k, avg_doc_length, seed, device, bool(sparse))
    rng = np.random.default_rng(seed)
    loadings = _on_simplex(rng.standard_exponential((n, k), np.float32))
    factors = _on_simplex(rng.standard_exponential((k, m), np.float32))
    if sparse is None:
        sparse = avg_doc_length < 0.1 * m
    draw = _sparse_rows_of if sparse else _dense_rows_of
    return draw(rng, loadings, factors, avg_doc_length), loadings, factors


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

    Terms follow Zipf's law; frequent ones are shared by all topics, rare ones belong to few. Documents have about
    `topics_per_document` topics, and different lengths.

    Without a device X is SparseCounts, which `fit` takes; on a CUDA device X is a sparse CSR tensor there.
    """
    _check_sizes(n=n, m=m, k=k, avg_doc_length=avg_doc_length)
    rng = np.random.default_rng(seed)
    factors = _zipf_topics(rng, k, m)
    if device is not None and str(device) != "cpu":
        return _zipf_on_device(n, k, factors, avg_doc_length, seed, device, topics_per_document)
    loadings = _on_simplex(rng.standard_gamma(topics_per_document / k, (n, k), np.float32) + np.float32(1e-9))
    drawn = _drawn(rng, loadings, factors, _lengths(rng, n, avg_doc_length))
    return SparseCounts(drawn, m), loadings, factors


def _check_sizes(**sizes: float) -> None:
    for name, value in sizes.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}={value}: give a number above 0", code="invalid-value", key=name)


def _on_simplex(rows: np.ndarray) -> np.ndarray:
    rows /= rows.sum(axis=1, keepdims=True)
    return rows


def _dense_rows_of(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, length: float) -> np.ndarray:
    n, m = len(loadings), factors.shape[1]
    counts = np.empty((n, m), np.uint8)
    rows = max(1, BLOCK_ENTRIES // m)
    for start in range(0, n, rows):
        drawn = rng.poisson(length * (loadings[start : start + rows] @ factors))
        kind = find_integer_type(drawn.max())
        if kind is None:
            message = f"avg_doc_length={length:g} gives counts above 2,147,483,647; use a smaller one"
            raise UserError(message, code="invalid-value", key="avg_doc_length")
        if kind.itemsize > counts.itemsize:
            counts = counts.astype(kind)
        counts[start : start + rows] = drawn
    return counts


def _sparse_rows_of(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, length: float) -> Any:
    import scipy.sparse

    drawn = _drawn(rng, loadings, factors, rng.poisson(length, len(loadings)))
    shape = len(loadings), factors.shape[1]
    return scipy.sparse.csr_array((drawn.data, drawn.indices, drawn.indptr), shape=shape)


def _drawn(rng: np.random.Generator, loadings: np.ndarray, factors: np.ndarray, lengths: np.ndarray) -> Csr:
    slots = np.stack([_lookup(row) for row in factors])
    ranges = cut_by_size(np.cumsum(lengths), BLOCK_WORDS)
    return join_rows([_draw_documents(rng, loadings[a:b], lengths[a:b], factors, slots) for a, b in ranges])


def _lengths(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    drawn = np.exp(rng.standard_normal(n) * SPREAD - SPREAD**2 / 2) * mean
    return np.maximum(np.rint(drawn), min(SHORTEST, mean)).astype(np.int64)


def _zipf_topics(rng: np.random.Generator, k: int, m: int) -> np.ndarray:
    common = 1.0 / (np.arange(m) + 2.7) ** 1.05
    common /= common.sum()
    factors = rng.standard_gamma(np.maximum(0.05 * m * common, 1e-3), (k, m))
    return _on_simplex(np.maximum(factors, 1e-12).astype(np.float32))


def _lookup(weights: np.ndarray) -> np.ndarray:
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


def _on_device(n: int, m: int, k: int, length: float, seed: int, device: Any, sparse: bool) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def simplex(rows: int, columns: int) -> Any:
        drawn = torch.empty(rows, columns, device=device).exponential_(generator=generator)
        return drawn.div_(drawn.sum(1, keepdim=True))

    loadings, factors = simplex(n, k), simplex(k, m)
    if sparse:
        lengths = torch.poisson(torch.full((n,), float(length), device=device), generator=generator).long()
        return _device_documents(lengths, loadings, factors, generator), loadings, factors
    counts = torch.empty(n, m, dtype=torch.uint8, device=device)
    rows = max(1, DEVICE_BLOCK_ENTRIES // m)
    for start in range(0, n, rows):
        drawn = torch.poisson(length * (loadings[start : start + rows] @ factors), generator=generator)
        if float(drawn.max()) > 255 and counts.dtype == torch.uint8:
            counts = counts.to(torch.int32)  # torch has little arithmetic for uint16
        counts[start : start + rows] = drawn
    return counts, loadings, factors


def _zipf_on_device(
    n: int, k: int, factors: np.ndarray, mean: float, seed: int, device: Any, topics: float
) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    on_device = torch.from_numpy(factors).to(device)
    shape = torch.full((n, k), topics / k, device=device)
    loadings = torch._standard_gamma(shape, generator=generator) + 1e-9
    loadings /= loadings.sum(1, keepdim=True)
    normal = torch.randn(n, device=device, generator=generator)
    lengths = (torch.exp(normal * SPREAD - SPREAD**2 / 2) * mean).round().clamp_(min=min(SHORTEST, mean)).long()
    return _device_documents(lengths, loadings, on_device, generator), loadings, on_device


def _device_documents(lengths: Any, loadings: Any, factors: Any, generator: Any) -> Any:
    import torch

    n, m, k = len(loadings), factors.shape[1], len(factors)
    of_topics = torch.cumsum(loadings.double(), 1)
    of_topics /= of_topics[:, -1:].clone()
    of_terms = torch.cumsum(factors.double(), 1)
    of_terms /= of_terms[:, -1:].clone()
    of_terms += torch.arange(k, device=factors.device).unsqueeze(1)
    flat = of_terms.reshape(-1)  # topic + share: one ascending line for all topics
    keys, numbers = [], []
    for first, last in cut_by_size(np.cumsum(lengths.cpu().numpy()), DEVICE_BLOCK_WORDS):
        document = torch.repeat_interleave(torch.arange(first, last, device=lengths.device), lengths[first:last])
        line = (of_topics[first:last] + torch.arange(last - first, device=lengths.device).unsqueeze(1)).reshape(-1)
        draw = torch.rand(len(document), device=lengths.device, dtype=torch.float64, generator=generator)
        topic = (torch.searchsorted(line, draw + (document - first)) - (document - first) * k).clamp_(0, k - 1)
        draw.uniform_(generator=generator)
        term = (torch.searchsorted(flat, draw + topic) - topic * m).clamp_(0, m - 1)
        key, number = torch.unique(document * m + term, return_counts=True)
        keys.append(key)
        numbers.append(number)
    key, number = torch.cat(keys), torch.cat(numbers)
    starts = torch.searchsorted(key, torch.arange(n + 1, device=key.device) * m)
    small = torch.uint8 if int(number.max()) <= 255 else torch.int32
    return torch.sparse_csr_tensor(starts, key % m, number.to(small), size=(n, m), check_invariants=False)
