"""Topics on a plane: near each other where they use the same terms, and not on top of each other."""

from __future__ import annotations

import numpy as np

AT_ONCE = 1 << 14
FILLED = 0.16  # of the plane, by all topics together
SMALLEST, LARGEST = 0.011, 0.13
MARGIN = 0.02
ROUNDS = 120


def overlaps(F: np.ndarray) -> np.ndarray:
    """(k, k): the sum over terms of sqrt(p q). 1 for the same topic, 0 for topics without a term in common."""
    k, m = F.shape
    total = np.zeros((k, k))
    for start in range(0, m, AT_ONCE):
        roots = np.sqrt(np.maximum(F[:, start : start + AT_ONCE], 0), dtype=np.float32)
        total += roots @ roots.T
    return np.minimum(total, 1.0)


def placed(overlap: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((k, 2) places, (k) radii) in a unit square: classical scaling of the Hellinger distances, then pushed apart."""
    k = len(overlap)
    radii = np.clip(np.sqrt(FILLED * shares / np.pi), SMALLEST, LARGEST)
    middle = overlap - overlap.mean(axis=0) - overlap.mean(axis=1)[:, None] + overlap.mean()
    values, vectors = np.linalg.eigh(middle)
    two = np.argsort(-values)[: min(2, k)]
    spots = np.zeros((k, 2))
    spots[:, : len(two)] = vectors[:, two] * np.sqrt(np.maximum(values[two], 0))
    for axis in range(len(two)):  # a sign of its own, so that the same topics make the same map
        if spots[np.abs(spots[:, axis]).argmax(), axis] < 0:
            spots[:, axis] *= -1
    spots += 1e-6 * np.column_stack([np.cos(np.arange(k)), np.sin(np.arange(k))])
    return _apart(_spread(spots), radii), radii


def _spread(spots: np.ndarray) -> np.ndarray:
    """Into the square, with outliers drawn in: half by place, half by rank."""
    k = len(spots)
    if k == 1:
        return np.full((1, 2), 0.5)
    low, high = spots.min(axis=0), spots.max(axis=0)
    place = (spots - low) / np.maximum(high - low, 1e-9)
    rank = np.argsort(np.argsort(spots, axis=0, kind="stable"), axis=0, kind="stable") / (k - 1)
    return 0.1 + 0.8 * (0.5 * place + 0.5 * rank)


def _apart(spots: np.ndarray, radii: np.ndarray) -> np.ndarray:
    need = radii[:, None] + radii[None, :] + 0.006
    np.fill_diagonal(need, 0)
    for _ in range(ROUNDS):
        step = spots[:, None, :] - spots[None, :, :]
        far = np.sqrt((step**2).sum(axis=-1)) + 1e-9
        push = np.maximum(need - far, 0)
        if not push.any():
            break
        spots = spots + (step / far[:, :, None] * (0.4 * push)[:, :, None]).sum(axis=1)
        spots = np.clip(spots, (MARGIN + radii)[:, None], (1 - MARGIN - radii)[:, None])
    return spots
