"""Scenes of digits over noise, with a mask that says which digit a pixel belongs to; nothing is downloaded.

A scene is a function of its number, the seed and where the digits come from.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.files import check_file, digest_of_files, digest_of_value
from paceline.data.order import fractions, stream
from paceline.errors import UserError
from paceline.plain_files import open_plain
from paceline.workloads.unet.corpus import ImageKind, Pair
from paceline.workloads.unet.outline import Glance
from paceline.workloads.unet.sections import ImageData
from paceline.workloads.unet.strokes import DRAWS, SIDE, draw

FORMAT = 1
"""Raised when the same settings give other scenes."""
CLASSES = ("background", *map(str, range(10)))
NOISE, INK = 0.5, 0.4
"""The height of the noise, and from where on a pixel belongs to a digit; a digit is from 0.6 to 1 bright."""
MOST_BYTES = 1 << 28
"""Of an unpacked file; those of MNIST have 47 MB at most."""
MNIST = {"train": "train", "test": "t10k"}

Digit = Callable[[NDArray[np.float64]], tuple[int, NDArray[np.float32]]]
"""From some numbers between 0 and 1: which digit, and its picture."""


class Scenes:
    """A source of pairs, see `paceline.workloads.unet.corpus`."""

    def __init__(self, data: ImageData) -> None:
        self.data = data
        self.channels, self.classes = 1, CLASSES

    def fingerprint(self) -> str:
        data = self.data
        settings = [data.digits, data.scenes, data.digits_per_scene, data.seed, data.size, data.test_fraction]
        files = [] if data.digits != "mnist" else [file for split in MNIST for file in self._mnist_files(split)]
        return digest_of_value(["scenes", FORMAT, settings, digest_of_files(files)])

    def pairs(self, split: str) -> Iterator[Pair]:
        digit, data = self._digits(split), self.data
        for number in range(self._count(split)):
            yield scene(numbers(data.seed, split == "test", number), digit, data.digits_per_scene, data.size)

    def _count(self, split: str) -> int:
        return self.data.scenes if split == "train" else max(1, round(self.data.scenes * self.data.test_fraction))

    def glance(self) -> Glance:
        if self.data.digits == "mnist":
            self._mnist_files("train")
        return Glance(ImageKind(self.channels, self.classes), self._count("train"), self._count("test"))

    def _digits(self, split: str) -> Digit:
        if self.data.digits == "drawn":
            return lambda some: (which := int(10 * some[0]), draw(which, some[1 : 1 + DRAWS]))
        images, labels = self._mnist(split) if self.data.digits == "mnist" else _sklearn(split)

        def pick(some: NDArray[np.float64]) -> tuple[int, NDArray[np.float32]]:
            index = int(some[0] * len(images))
            return int(labels[index]), images[index].astype(np.float32) / 255

        return pick

    def _mnist_files(self, split: str) -> list[Path]:
        assert self.data.path is not None
        names = (f"{MNIST[split]}-{name}.gz" for name in ("images.idx3-ubyte", "labels.idx1-ubyte"))
        return [check_file(self.data.path.expanduser() / name, "data.path") for name in names]

    def _mnist(self, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        images, labels = self._mnist_files(split)
        try:
            pixels, classes = _unpacked(images), _unpacked(labels)
            return (
                np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, SIDE, SIDE),
                np.frombuffer(classes, np.uint8, offset=8),
            )
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"data.path={images.parent}: MNIST's {split} files are damaged ({error})") from None


def _unpacked(file: Path) -> bytes:
    with open_plain(file) as packed, gzip.open(packed) as content:
        found: bytes = content.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"{file.name} unpacks to more than {MOST_BYTES:,} bytes")
    return found


def _sklearn(split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Real digits of 8 × 8 pixels, enlarged; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "data.digits=sklearn: scikit-learn is not installed; use data.digits=drawn, or  pip install scikit-learn"
        ) from None
    from PIL import Image

    found = load_digits()
    mine = (np.arange(len(found.target)) % 5 == 0) == (split == "test")
    small = (found.images[mine] * 15.9).astype(np.uint8)
    inner = (SIDE - 4, SIDE - 4)
    large = [np.pad(Image.fromarray(one).resize(inner, Image.Resampling.BICUBIC), 2) for one in small]
    return np.stack(large), found.target[mine].astype(np.uint8)


def numbers(*words: int) -> Callable[[int], NDArray[np.float64]]:
    """A stream of numbers from 0 to 1 that depends on these words alone; called with how many come next."""
    state, taken = stream(*words), 0

    def take(count: int) -> NDArray[np.float64]:
        nonlocal taken
        taken += count
        return fractions(state, taken - count, count)

    return take


def scene(take: Callable[[int], NDArray[np.float64]], digit: Digit, count: int, size: int) -> Pair:
    image, mask = np.zeros((size, size), np.float32), np.zeros((size, size), np.uint8)
    for _ in range(count):
        which, picture = digit(take(1 + DRAWS))
        down, right, bright = take(3)
        top, left = int(down * (size - SIDE + 1)), int(right * (size - SIDE + 1))
        place = slice(top, top + SIDE), slice(left, left + SIDE)
        ink = picture > INK
        image[place] = np.where(ink, picture * (0.6 + 0.4 * bright), image[place])
        mask[place] = np.where(ink, which + 1, mask[place])
    noise = NOISE * take(size * size).reshape(size, size)
    return (255 * np.clip(image * (1 - NOISE / 2) + noise / 2, 0, 1)).astype(np.uint8)[..., None], mask
