"""The documents of an explorer: those that show a topic best, with their mixtures; and all of them as a strip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.workloads.topics.counts.blocks import Counts, sparse_rows
from paceline.workloads.topics.counts.stream import blocks
from paceline.workloads.topics.result.align import means_of_neighbours, sort_documents
from paceline.workloads.topics.result.relevance import largest

if TYPE_CHECKING:
    from paceline.workloads.topics.counts.totals import Totals
    from paceline.workloads.topics.result.model import TopicFit

PER_TOPIC = 20
ALL_UP_TO = 5_000
MOST_IN_MIXTURE, LEAST_SHARE = 12, 0.01
TERMS = 10
BLOCK_BYTES = 16 << 20
LONGEST_NAME = 200
STRIPES, STRIPE_TOPICS = 320, 12


@dataclass(frozen=True)
class ShownDocuments:
    names: list[str]
    lengths: list[float] | None
    mixtures: list[list[int]]
    """topic, share in a thousand, topic, share in a thousand, ..."""
    terms: list[np.ndarray] | None
    tops: list[list[int]]
    """For each topic the places of its first documents in these lists."""

    @property
    def all_terms(self) -> np.ndarray:
        return np.concatenate(self.terms).astype(np.int64) if self.terms else np.zeros(0, np.int64)


def documents_shown(
    model: TopicFit, counts: Counts | None, sums: Totals | None, everywhere: np.ndarray, names: Sequence[str] | None
) -> ShownDocuments:
    """Every document of a small collection; of a large one the first documents of each topic."""
    firsts = [largest(_rank(model.L[:, topic], sums), PER_TOPIC) for topic in range(model.k)]
    firsts = [found[model.L[found, topic] >= LEAST_SHARE] for topic, found in enumerate(firsts)]
    shown = np.arange(len(model.L)) if len(model.L) <= ALL_UP_TO else np.unique(np.concatenate(firsts))
    place = np.full(len(model.L), -1, np.int64)
    place[shown] = np.arange(len(shown))
    told = [str(names[at]) if names is not None else model.document(at) for at in shown.tolist()]
    return ShownDocuments(
        [name[:LONGEST_NAME] for name in told],
        None if sums is None else [float(f"{v:.6g}") for v in sums.per_document[shown]],
        [_mixture(model.L[at]) for at in shown],
        None if counts is None else _typical(counts, shown, everywhere),
        [place[found].tolist() for found in firsts],
    )


def _rank(shares: np.ndarray, sums: Totals | None) -> np.ndarray:
    """By share; of equal ones the longer first."""
    if sums is None:
        return shares
    return shares.astype(np.float64) + 1e-3 * sums.per_document / (sums.per_document.max() + 1)


def _mixture(shares: np.ndarray) -> list[int]:
    return _in_thousandths(shares, largest(shares, MOST_IN_MIXTURE))


def _in_thousandths(shares: np.ndarray, topics: np.ndarray) -> list[int]:
    """topic, share in a thousand, topic, ..."""
    return [n for at in topics if shares[at] >= LEAST_SHARE for n in (int(at), round(1000 * float(shares[at])))]


def _typical(counts: Counts, shown: np.ndarray, everywhere: np.ndarray) -> list[np.ndarray]:
    """For each document the terms that it uses more than others do: the largest parts of its divergence from all."""
    found = []
    for block in blocks(counts, 0, counts.documents, BLOCK_BYTES):
        nonzeros = sparse_rows(block.values)
        inside = shown[(shown >= block.start) & (shown < block.stop)] - block.start
        for at in inside.tolist():
            row = nonzeros.between(at, at + 1)
            terms, x = row.indices, row.data.astype(np.float64)
            score = x * np.log(np.maximum(x / max(x.sum(), 1e-30), 1e-30) / np.maximum(everywhere[terms], 1e-9))
            found.append(terms[largest(score, TERMS)])
    return found


def stripes(L: np.ndarray) -> list[list[int]]:
    """All documents side by side in columns, each as the mixture of its documents: topic, share in a thousand, ..."""
    means = means_of_neighbours(L, sort_documents(L), STRIPES)
    # in the order of topics, so that neighbours line up
    return [_in_thousandths(mean, np.sort(largest(mean, STRIPE_TOPICS))) for mean in means]
