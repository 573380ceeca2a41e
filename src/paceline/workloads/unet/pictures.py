"""Images, their masks and the masks that were found, side by side: what people look at first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.training.pictures import palette
from paceline.workloads.unet.corpus import IGNORED

GAP = 2
SHOWN_SIDE = 128
"""Smaller images are enlarged to about this."""


def side_by_side(images: NDArray[np.uint8], truth: NDArray[np.uint8], found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One row per sample: the image, its mask, the mask that was found; what does not count is grey in both."""
    found = np.where(truth == IGNORED, truth, found)
    rows = [
        np.concatenate([*map(_framed, (_in_colour(image), painted(mask), painted(said)))], axis=1)
        for image, mask, said in zip(images, truth, found, strict=True)
    ]
    return np.concatenate(rows)


def painted(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A mask in colours: the background black, what does not count grey."""
    return palette()[mask]


def _in_colour(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first channel in grey where there are not three."""
    return image if image.shape[2] == 3 else np.repeat(image[..., :1], 3, axis=2)


def _framed(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    times = max(1, SHOWN_SIDE // max(picture.shape[:2]))
    large = picture.repeat(times, axis=0).repeat(times, axis=1)
    return np.pad(large, ((GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255)
