"""Apply a model to documents: mixtures of new documents, perplexity and coherence."""

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import InvalidData, InvalidValue, UserError
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DocumentBlock,
    SparseCounts,
    shrink,
    to_sparse,
)
from paceline.workloads.topics.counts.stream import iterate_blocks
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.texts import SUFFIXES, TextOptions, is_text, read_text
from paceline.workloads.topics.fitting.engine import LEAST
from paceline.workloads.topics.fitting.passes import CoreSparsePass, make_cpu_pass
from paceline.workloads.topics.fitting.problem import FEW_SWEEPS, find_first_rows
from paceline.workloads.topics.sizes import NEWTON_TOPICS

if TYPE_CHECKING:
    from paceline.workloads.topics.result.model import TopicFit


BLOCK_BYTES = 16 << 20
NUMBERS_AT_ONCE = 1 << 22


def compute_perplexity(model: "TopicFit", counts: Counts, smoothing: float, seed: int) -> float:
    """Compute TopicFit.perplexity. Documents without a word in one of the halves are left out."""
    if not 0 <= smoothing < 1:
        raise InvalidValue(f"smoothing={smoothing}: give a share below 1", key="smoothing")
    chance = np.random.default_rng(seed)
    by_term, together = np.ascontiguousarray(model.F.T), max(1, NUMBERS_AT_ONCE // model.k)
    log_likelihood, words = 0.0, 0.0
    for block in iterate_blocks(counts, 0, counts.documents, BLOCK_BYTES):
        known, unseen = split_in_halves(to_sparse(block.values), chance)
        row = unseen.row_numbers
        scored = np.diff(known.indptr)[row] > 0
        if not scored.any():
            continue
        half = SparseCounts(known, counts.terms, fractional=counts.fractional)
        found, _ = infer_mixtures(half, model.F)
        rows, terms = row[scored], unseen.indices[scored]
        p = np.empty(len(rows))
        for start in range(0, len(rows), together):
            at = slice(start, start + together)
            p[at] = np.einsum("ij,ij->i", found[rows[at]], by_term[terms[at]], dtype=np.float64)
        p = (1 - smoothing) * p + smoothing / counts.terms
        x = unseen.data[scored].astype(np.float64)
        with np.errstate(divide="ignore"):
            log_likelihood += float(x @ np.log(p))
        words += float(x.sum())
    if not words:
        raise InvalidData("no document has two words: there is nothing to score")
    return math.exp(min(700.0, -log_likelihood / words))


def split_in_halves(values: Csr, chance: np.random.Generator) -> tuple[Csr, Csr]:
    """Split words by a coin into two halves; an entry with a fraction goes to one as a whole."""
    if values.data.dtype.kind == "f":
        first = np.where(chance.random(len(values.data)) < 0.5, values.data, np.float32(0))
    else:
        first = chance.binomial(values.data.astype(np.int64), 0.5)
    return _with_counts(values, first), _with_counts(values, values.data - first)


def _with_counts(values: Csr, data: np.ndarray) -> Csr:
    return values.select(data > 0, data.astype(np.float32) if data.dtype.kind == "f" else shrink(data))


def compute_coherence(counts: Counts, topics: Sequence[np.ndarray]) -> np.ndarray:
    import scipy.sparse

    wanted = np.unique(np.concatenate(topics))
    if any(len(terms) < 2 for terms in topics):
        raise InvalidValue("coherence is of pairs of terms: give n of at least 2", key="n")
    place = np.full(counts.terms, -1, np.int32)
    place[wanted] = np.arange(len(wanted), dtype=np.int32)
    rows, columns = [], []
    for block in iterate_blocks(counts, 0, counts.documents, BLOCK_BYTES):
        values = to_sparse(block.values)
        at = place[values.indices]
        rows.append(block.start + values.row_numbers[at >= 0])
        columns.append(at[at >= 0])
    row, column = np.concatenate(rows), np.concatenate(columns)
    shape = (counts.documents, len(wanted))
    holds = scipy.sparse.csc_array((np.ones(len(row), np.float32), (row, column)), shape=shape)
    return np.array([_compute_mean_npmi(holds[:, place[terms]], counts.documents) for terms in topics])


def _compute_mean_npmi(holds: object, documents: int) -> float:
    together = (holds.T @ holds).toarray().astype(np.float64)  # type: ignore[attr-defined]
    alone = np.diag(together)
    pairs = np.triu_indices(len(alone), 1)
    meet, expected = together[pairs], alone[pairs[0]] * alone[pairs[1]] / documents
    value = np.full(len(meet), -1.0)
    value[meet == documents] = 1.0
    some = (meet > 0) & (meet < documents)
    value[some] = np.log(meet[some] / expected[some]) / -np.log(meet[some] / documents)
    return float(value.mean())


FILES = (".npy", ".npz", ".mtx", ".parquet", ".gz", ".safetensors", *SUFFIXES)

Tensor = Any  # torch is not typed here
EM_STEPS = 10  # for one Newton step
SAME_COLUMNS = "give the same columns in the same order, or the texts themselves"


def read_matching_counts(model: "TopicFit", source: Any, fractional: bool = False) -> Counts:
    """Read counts with the columns of the model, from whatever `fit` takes or from texts."""
    if (texts := _find_texts(source)) is not None:
        if model.terms is None:
            message = "the model has no terms to count texts with: give counts, or set  model.terms = [...]  first"
            raise UserError(message, code="invalid-request", key="terms")
        saved = model.settings.get("text") or {}
        options = TextOptions(**{item.name: saved[item.name] for item in fields(TextOptions) if item.name in saved})
        return read_text(texts, options, model.terms)
    counts = read_counts(source, fractional=fractional)
    terms = model.F.shape[1]
    if counts.terms != terms:
        message = f"the documents have {counts.terms:,} columns and the model {terms:,} terms; {SAME_COLUMNS}"
        raise InvalidData(message, key="columns")
    if model.terms is not None and counts.vocabulary is not None:
        pairs = zip(counts.vocabulary, model.terms, strict=True)
        other = next((at for at, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        if other is not None:
            pair = f"{counts.vocabulary[other]!r} in the documents and {model.terms[other]!r} in the model"
            message = f"column {other} (from 0) is {pair}; {SAME_COLUMNS}"
            raise InvalidData(message, key=model.terms[other])
    return counts


def _find_texts(source: Any) -> str | Path | list[str] | None:
    """Return the texts in the source or the path that has them; None for counts."""
    if isinstance(source, str) and not _is_path(source):
        return [source]
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        return path if is_text(path) else None
    if isinstance(source, list | tuple) and source and all(isinstance(text, str) for text in source):
        return list(source)
    return None


def _is_path(text: str) -> bool:
    """Return whether a string is a path: it exists, or is one word with a known suffix."""
    if text.lower().endswith(FILES) and len(text.split()) == 1:
        return True
    return ("/" in text or "." in text) and os.path.exists(os.path.expanduser(text))


def infer_mixtures(
    counts: Counts, F: np.ndarray, passes: int = 100, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """Return the mixtures (documents, k) for fixed topics, and the loss.

    Each row ends when a step gains less than `tolerance` of its loss: documents do not depend on each other.
    """
    Ft = torch.from_numpy(np.ascontiguousarray(F.T, np.float32)).clamp_min(LEAST)
    L = torch.full((counts.documents, Ft.shape[1]), 1 / Ft.shape[1])
    loss = float(counts.documents)
    for block in iterate_blocks(counts):
        loss += _solve_block(block, L[block.start : block.stop], Ft, passes, tolerance)
    return L.numpy(), loss


def _solve_block(block: DocumentBlock, L: Tensor, Ft: Tensor, steps: int, tolerance: float) -> float:
    nonzeros = DocumentBlock(block.start, to_sparse(block.values))
    work, share = make_cpu_pass(nonzeros, Ft[:, 0]), Ft.mean(1)
    L.copy_(find_first_rows(work, Ft, work.multiply(torch.ones(len(Ft), 1))[:, 0], share, FEW_SWEEPS))
    if isinstance(work, CoreSparsePass) and L.shape[1] <= NEWTON_TOPICS:
        return work.solve(L, Ft, steps, tolerance)
    unused = torch.zeros_like(Ft)
    for _ in range(EM_STEPS * steps):
        before = L.clone()
        work(L, Ft, unused, loss=False)
        if float((L - before).abs().max()) <= tolerance:
            break
    return float(work(L.clone(), Ft, unused))
