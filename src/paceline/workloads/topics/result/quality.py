"""How good topics are: perplexity of words that were held back, and the company that the terms of a topic keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts, Csr, SparseCounts, allows_fractions, sparse_rows
from paceline.workloads.topics.counts.dtypes import whole_type
from paceline.workloads.topics.counts.stream import blocks

if TYPE_CHECKING:
    from paceline.workloads.topics.result.model import TopicFit

BLOCK_BYTES = 16 << 20
NUMBERS_AT_ONCE = 1 << 22


def perplexity(model: TopicFit, counts: Counts, smoothing: float, seed: int) -> float:
    """See TopicFit.perplexity. Documents without a word in one of the halves are left out."""
    from paceline.workloads.topics.result.new_documents import documents_given_topics

    if not 0 <= smoothing < 1:
        raise UserError(f"smoothing={smoothing}: a share of at least 0 and below 1, such as 0.01")
    chance = np.random.default_rng(seed)
    by_term = np.ascontiguousarray(model.F.T)
    log_likelihood, words = 0.0, 0.0
    for block in blocks(counts, 0, counts.documents, BLOCK_BYTES):
        known, unseen = halves(sparse_rows(block.values), chance)
        row = unseen.row_numbers
        scored = np.diff(known.indptr)[row] > 0
        if not scored.any():
            continue
        half = SparseCounts(known, counts.terms, fractional=allows_fractions(counts))
        found, _ = documents_given_topics(half, model.F)
        p = probabilities(found, by_term, row[scored], unseen.indices[scored])
        p = (1 - smoothing) * p + smoothing / counts.terms
        x = unseen.data[scored].astype(np.float64)
        with np.errstate(divide="ignore"):
            log_likelihood += float(x @ np.log(p))
        words += float(x.sum())
    if not words:
        raise UserError("no document has two words: there is nothing to hold back and score")
    return math.exp(min(700.0, -log_likelihood / words))


def halves(values: Csr, chance: np.random.Generator) -> tuple[Csr, Csr]:
    """Every word by a coin to one of two halves. Fractions are not words: an entry goes to one half as a whole."""
    if values.data.dtype.kind == "f":
        first = np.where(chance.random(len(values.data)) < 0.5, values.data, np.float32(0))
    else:
        first = chance.binomial(values.data.astype(np.int64), 0.5)
    return _some(values, first), _some(values, values.data - first)


def _some(values: Csr, data: np.ndarray) -> Csr:
    """The same rows with these counts, without zeros."""
    kind = np.float32 if data.dtype.kind == "f" else whole_type(data.max(initial=0)) or np.dtype(np.int32)
    return values.only(data > 0, data.astype(kind))


def probabilities(L: np.ndarray, by_term: np.ndarray, rows: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """(LF) at some places, from F transposed. float64."""
    found = np.empty(len(rows))
    together = max(1, NUMBERS_AT_ONCE // L.shape[1])
    for start in range(0, len(rows), together):
        at = slice(start, start + together)
        found[at] = np.einsum("ij,ij->i", L[rows[at]], by_term[terms[at]], dtype=np.float64)
    return found


def coherence(counts: Counts, topics: Sequence[np.ndarray]) -> np.ndarray:
    """See TopicFit.coherence. One pass over the documents, which keeps the columns of these terms alone."""
    import scipy.sparse

    wanted = np.unique(np.concatenate(topics))
    if any(len(terms) < 2 for terms in topics):
        raise UserError("coherence is about pairs of terms: it needs n of at least 2, and two terms")
    place = np.full(counts.terms, -1, np.int32)
    place[wanted] = np.arange(len(wanted), dtype=np.int32)
    rows, columns = [], []
    for block in blocks(counts, 0, counts.documents, BLOCK_BYTES):
        values = sparse_rows(block.values)
        at = place[values.indices]
        rows.append(block.start + values.row_numbers[at >= 0])
        columns.append(at[at >= 0])
    row, column = np.concatenate(rows), np.concatenate(columns)
    shape = (counts.documents, len(wanted))
    holds = scipy.sparse.csc_array((np.ones(len(row), np.float32), (row, column)), shape=shape)
    return np.array([_npmi(holds[:, place[terms]], counts.documents) for terms in topics])


def _npmi(holds: object, documents: int) -> float:
    together = (holds.T @ holds).toarray().astype(np.float64)  # type: ignore[attr-defined]
    alone = np.diag(together)
    pairs = np.triu_indices(len(alone), 1)
    meet, expected = together[pairs], alone[pairs[0]] * alone[pairs[1]] / documents
    value = np.full(len(meet), -1.0)
    value[meet == documents] = 1.0
    some = (meet > 0) & (meet < documents)
    value[some] = np.log(meet[some] / expected[some]) / -np.log(meet[some] / documents)
    return float(value.mean())
