"""Orders: of the terms that stand for a topic, of topics beside those of another fit, of documents in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import UserError

BY_LIFT = 0.05  # the weight of log p: of the many terms that one topic alone uses, the more probable come first
WAYS = {"probability": 1.0, "lift": BY_LIFT}
SMALLEST = 1e-30


class Alignment(NamedTuple):
    order: np.ndarray
    """F[order] has the topics in the order of the reference; topics that it does not have come last."""
    similarities: np.ndarray
    """The cosine of each with its counterpart; NaN for those without one."""


def align_topics(F: Any, reference: Any) -> Alignment:
    """Match topics one to one so that the sum of their cosines is largest. Takes fits or arrays (k, terms)."""
    from scipy.optimize import linear_sum_assignment

    ours, theirs = matrix(F, "F"), matrix(reference, "F")
    if ours.shape[1] != theirs.shape[1]:
        raise UserError(f"topics over {ours.shape[1]:,} and over {theirs.shape[1]:,} terms cannot be compared")
    if len(ours) < len(theirs):
        raise UserError(f"{len(ours)} topics cannot be matched one to one with {len(theirs)}: swap the two")
    cosines = _unit(theirs) @ _unit(ours).T
    _, matched = linear_sum_assignment(cosines, maximize=True)
    rest = np.setdiff1d(np.arange(len(ours)), matched)
    similar = cosines[np.arange(len(theirs)), matched]
    return Alignment(np.concatenate([matched, rest]), np.concatenate([similar, np.full(len(rest), np.nan)]))


def sort_documents(L: Any) -> np.ndarray:
    """Documents by their leading topic, then by their second, then from the purest to the most mixed.

    Neighbours look alike, one sees which topics go together, and 100,000 documents take a fraction of a second.
    """
    shares = matrix(L, "L")
    documents = np.arange(len(shares))
    first = shares.argmax(axis=1)
    lead = shares[documents, first]
    others = shares.copy()
    others[documents, first] = -1
    return np.lexsort((-lead, others.argmax(axis=1), first))


def means_of_neighbours(shares: np.ndarray, order: np.ndarray, most: int) -> np.ndarray:
    """The mixtures of some documents in this order; of more than `most`, the means of neighbours."""
    edges = np.linspace(0, len(order), min(most, len(order)) + 1).round().astype(np.int64)
    return np.add.reduceat(shares[order], edges[:-1], axis=0) / np.diff(edges)[:, None]


def matrix(given: Any, which: str) -> np.ndarray:
    """L or F of a fit, or the array itself; tensors too."""
    from paceline.workloads.topics.result.model import TopicFit

    if not isinstance(given, TopicFit) and hasattr(given, "fit_"):
        given = given.fit_
    if isinstance(given, TopicFit):
        return getattr(given, which)
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    array = np.asarray(given)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
        shape = "(documents, k)" if which == "L" else "(k, terms)"
        raise UserError(f"a fit or an array {shape} is needed; this is {type(given).__name__} of shape {array.shape}")
    return array


def _unit(F: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(F.astype(np.float32, copy=False), axis=1, keepdims=True)
    return F / np.maximum(lengths, 1e-30)


def overall(F: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The probability of every term over all documents, as the model has it. float64."""
    return np.asarray(shares, np.float64) @ F


def top_terms(F: np.ndarray, shares: np.ndarray, n: int, by: str = "probability") -> list[np.ndarray]:
    """For each topic the numbers of its n first terms."""
    if by not in WAYS:
        raise UserError(f"by={by!r}: terms are ranked by  {'  or by  '.join(WAYS)}")
    if n < 1:
        raise UserError(f"n={n}: ask for at least one term")
    return ranked(F, overall(F, shares), n, [WAYS[by]])[0]


def ranked(F: np.ndarray, everywhere: np.ndarray, n: int, weights: Sequence[float]) -> list[list[np.ndarray]]:
    """For each weight w, for each topic, the n first terms by  w log p + (1 - w) log lift.

    Lift is p(term in topic) / p(term everywhere). It favours terms that are hardly ever used, so only terms that are
    more probable in the topic than 1 / number of terms take part; the others come after them.
    """
    n = min(n, F.shape[1])
    log_everywhere = np.log(np.maximum(everywhere, SMALLEST)).astype(np.float32)
    found: list[list[np.ndarray]] = [[] for _ in weights]
    for p in F:
        log_p = np.log(np.maximum(p, SMALLEST))
        rare = p * np.float32(F.shape[1]) < 1
        for place, weight in enumerate(weights):
            score = log_p - np.float32(1 - weight) * log_everywhere
            if weight < 1:
                score[rare] = log_p[rare] - np.float32(1e3)
            found[place].append(largest(score, n))
    return found


def largest(values: np.ndarray, n: int) -> np.ndarray:
    """The places of the n largest values, largest first; of equals, the first."""
    n = min(n, len(values))
    if 4 * n < len(values):
        least = np.partition(values, len(values) - n)[len(values) - n]
        near = np.flatnonzero(values >= least)
        return near[np.argsort(-values[near], kind="stable")[:n]]
    return np.argsort(-values, kind="stable")[:n]
