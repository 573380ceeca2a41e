"""Digits as strokes, each drawn a little differently: pictures that are on every machine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SIDE = 28
DRAWS = 8
"""Numbers from 0 to 1 that one digit takes."""

Line = list[tuple[float, float]]


def _arc(x: float, y: float, width: float, height: float, begin: float, end: float) -> Line:
    """Part of an ellipse around (x, y); angles in turns, clockwise from the right."""
    angles = 2 * np.pi * np.linspace(begin, end, 9)
    return [(x + width * float(np.cos(a)), y + height * float(np.sin(a))) for a in angles]


DIGITS: tuple[list[Line], ...] = (
    [_arc(0.5, 0.5, 0.28, 0.4, 0, 1)],
    [[(0.32, 0.28), (0.54, 0.1), (0.54, 0.9)]],
    [[*_arc(0.5, 0.34, 0.26, 0.24, 0.5, 1.1), (0.24, 0.9), (0.78, 0.9)]],
    [[*_arc(0.47, 0.3, 0.25, 0.2, 0.6, 1.2), *_arc(0.47, 0.69, 0.28, 0.21, 0.8, 1.4)]],
    [[(0.64, 0.9), (0.64, 0.1), (0.2, 0.64), (0.82, 0.64)]],
    [[(0.74, 0.1), (0.32, 0.1), (0.29, 0.46), *_arc(0.46, 0.66, 0.28, 0.24, 0.7, 1.4)]],
    [[(0.66, 0.1), (0.38, 0.36), (0.25, 0.66)], _arc(0.5, 0.68, 0.25, 0.22, 0, 1)],
    [[(0.22, 0.1), (0.78, 0.1), (0.42, 0.9)]],
    [_arc(0.5, 0.3, 0.21, 0.2, 0, 1), _arc(0.5, 0.7, 0.26, 0.2, 0, 1)],
    [_arc(0.48, 0.33, 0.24, 0.22, 0, 1), [(0.72, 0.34), (0.62, 0.9)]],
)
"""In a square of side 1, y downwards."""


def draw(digit: int, draws: NDArray[np.float64]) -> NDArray[np.float32]:
    """A digit on SIDE × SIDE pixels, from 0 to 1: turned, slanted, stretched, thick or thin, as the numbers say."""
    turn, slant, wide, tall, thick, right, down, soft = draws
    angle, shear = 0.5 * (turn - 0.5), 0.6 * (slant - 0.5)
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turned @ np.array([[0.75 + 0.35 * wide, shear], [0.0, 0.75 + 0.3 * tall]])
    centre = SIDE / 2 + 2 * np.array([right - 0.5, down - 0.5])
    pixels = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), axis=-1) + 0.5
    distance = np.full((SIDE, SIDE), np.inf)
    for line in DIGITS[digit]:
        points = (np.array(line) - 0.5) @ matrix.T * (SIDE - 6) + centre
        for a, b in pairwise(points):
            along = np.clip(((pixels - a) @ (b - a)) / max(float((b - a) @ (b - a)), 1e-9), 0, 1)
            distance = np.minimum(distance, np.linalg.norm(pixels - a - along[..., None] * (b - a), axis=-1))
    return np.clip((1.2 + 0.8 * thick - distance) / (0.7 + 0.6 * soft) + 0.5, 0, 1).astype(np.float32)
