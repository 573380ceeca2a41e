"""Documents that a model has not seen: brought to its columns, their mixtures, and the exact loss of mixtures."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts, Csr, DocumentBlock, SparseCounts, sparse_rows
from paceline.workloads.topics.counts.on_device import DeviceCounts
from paceline.workloads.topics.counts.stream import blocks
from paceline.workloads.topics.device.tiers import TINIEST, minus_x_log_p
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.texts import SUFFIXES, TextOptions, is_text, read_text
from paceline.workloads.topics.fitting.engine import LEAST
from paceline.workloads.topics.fitting.on_cores import CoreSparsePass, cpu_pass
from paceline.workloads.topics.fitting.problem import FEW_SWEEPS, first_rows
from paceline.workloads.topics.sizes import NEWTON_TOPICS

if TYPE_CHECKING:
    from paceline.workloads.topics.result.model import TopicFit

FILES = (".npy", ".npz", ".mtx", ".parquet", ".gz", ".safetensors", *SUFFIXES)

Tensor = Any  # torch.Tensor; torch is not typed here
EM_STEPS = 10  # for one Newton step
EXACT_BYTES = 4 << 20


def matching_counts(model: TopicFit, source: Any, fractional: bool = False) -> Counts:
    """Counts with the columns of the model, from whatever `fit` takes or from texts."""
    texts = _texts(source)
    if texts is not None:
        return _counted(model, texts)
    counts = read_counts(source, fractional=fractional)
    terms = model.F.shape[1]
    if counts.terms != terms:
        raise UserError(
            f"the documents have {counts.terms:,} columns and the model {terms:,} terms: give the same columns in the "
            f"same order{', or the texts themselves' if model.terms else ''}"
        )
    if model.terms is not None and counts.vocabulary is not None:
        pairs = zip(counts.vocabulary, model.terms, strict=True)
        other = next((at for at, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        if other is not None:
            raise UserError(
                f"column {other} (from 0) is {counts.vocabulary[other]!r} in the documents and {model.terms[other]!r} "
                "in the model: give the same columns in the same order, or the texts themselves"
            )
    return counts


def _texts(source: Any) -> str | Path | list[str] | None:
    """What is to be tokenised: texts, or the path of a file of texts. None for counts."""
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        path = Path(source).expanduser()
        return path if is_text(path) else None
    if isinstance(source, str):
        return [source]
    if isinstance(source, list | tuple) and source and all(isinstance(text, str) for text in source):
        return list(source)
    return None


def _names_a_file(text: str) -> bool:
    """A text has words in it; a path does not, or is there."""
    if len(text) > 1000 or "\n" in text:
        return False
    if text.lower().endswith(FILES) and len(text.split()) == 1:
        return True
    try:
        return ("/" in text or "." in text) and Path(text).expanduser().exists()
    except (OSError, ValueError):
        return False


def _counted(model: TopicFit, texts: str | Path | list[str]) -> SparseCounts:
    if model.terms is None:
        raise UserError(
            "texts were given, but the model does not know its terms: give counts, or set  model.terms = [...]  first"
        )
    told = model.settings.get("text") or {}
    options = TextOptions(**{item.name: told[item.name] for item in fields(TextOptions) if item.name in told})
    return read_text(texts, options, model.terms)


def documents_given_topics(
    counts: Counts, F: np.ndarray, passes: int = 100, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """Mixtures (documents, k) for topics that stay as they are, and the loss.

    Each row ends when a step gains less than `tolerance` of its own loss: it does not depend on the other documents.
    """
    Ft = torch.from_numpy(np.ascontiguousarray(F.T, np.float32)).clamp_min(LEAST)
    L = torch.full((counts.documents, Ft.shape[1]), 1 / Ft.shape[1])
    loss = float(counts.documents)
    for block in blocks(counts):
        loss += _rows_for_topics(block, L[block.start : block.stop], Ft, passes, tolerance)
    return L.numpy(), loss


def _rows_for_topics(block: DocumentBlock, L: Tensor, Ft: Tensor, steps: int, tolerance: float) -> float:
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
            total -= float(values.data @ np.log(np.maximum(p, TINIEST)))
        else:
            total -= float((values * np.log(np.maximum(rows @ Ft.T, TINIEST))).sum())
    return total
