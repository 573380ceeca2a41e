"""Topics of one fit beside those of another, and documents in an order that makes a smooth picture."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from paceline.errors import UserError


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
