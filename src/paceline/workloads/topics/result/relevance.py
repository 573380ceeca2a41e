"""Which terms stand for a topic: the most probable, the most distinctive, and everything between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import UserError

BY_LIFT = 0.05  # the weight of log p: of the many terms that one topic alone uses, the more probable come first
WAYS = {"probability": 1.0, "lift": BY_LIFT}
SMALLEST = 1e-30


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
