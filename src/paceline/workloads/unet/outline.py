"""What a plan must know of the images of a run file: how many there are and of what kind. None is made or prepared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.workload import Outline
from paceline.workloads.unet.corpus import ImageKind
from paceline.workloads.unet.samples import Batch

TRIED, LOWEST = 32, 2
"""Pixels to a side: what an image takes grows with its pixels, so a small one tells; and those of its lowest level."""


@dataclass(frozen=True)
class Glance:
    """What a source of images says of them before it reads them all."""

    kind: ImageKind
    train: int
    tiles: int
    """Of the images that are held out."""
    assumptions: tuple[str, ...] = ()


class BlankImages:
    """So many samples, all black."""

    def __init__(self, count: int, channels: int, size: int) -> None:
        self.count, self.channels, self.size = count, channels, size

    def __len__(self) -> int:
        return self.count

    def cost(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones(len(ids))

    def batch(self, ids: NDArray[np.int64], keys: NDArray[np.int64]) -> Batch:
        shape = len(ids), self.channels, self.size, self.size
        return torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[:1] + shape[2:], dtype=torch.uint8)


def outline_of(seen: Glance, size: int, depth: int) -> Outline:
    """Of samples of size × size pixels, for a model that halves them `depth` times."""
    small = min(size, max(TRIED, LOWEST * 2**depth))
    samples = BlankImages(seen.train, seen.kind.channels, small)
    return Outline(samples, seen.tiles, (size / small) ** 2, seen.assumptions)
