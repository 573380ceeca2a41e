"""Scenes of digits over noise, with a mask that gives the digit of each pixel; nothing is downloaded."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.files import check_file, hash_files, hash_value, invalid_data
from paceline.data.order import derive_key, draw_fractions
from paceline.errors import UserError
from paceline.io.safe_open import read_bytes
from paceline.workloads.unet.corpus import ImageKind, ImagePair, ImageSummary, Pixels
from paceline.workloads.unet.sections import ImageData

SIDE = 28
DRAWS = 8  # random numbers per digit

Line = list[tuple[float, float]]


def _make_arc(x: float, y: float, width: float, height: float, begin: float, end: float) -> Line:
    """Return part of an ellipse around (x, y); angles in turns, clockwise from the right."""
    angles = 2 * np.pi * np.linspace(begin, end, 9)
    return [(x + width * float(np.cos(a)), y + height * float(np.sin(a))) for a in angles]


DIGITS: tuple[list[Line], ...] = (
    [_make_arc(0.5, 0.5, 0.28, 0.4, 0, 1)],
    [[(0.32, 0.28), (0.54, 0.1), (0.54, 0.9)]],
    [[*_make_arc(0.5, 0.34, 0.26, 0.24, 0.5, 1.1), (0.24, 0.9), (0.78, 0.9)]],
    [[*_make_arc(0.47, 0.3, 0.25, 0.2, 0.6, 1.2), *_make_arc(0.47, 0.69, 0.28, 0.21, 0.8, 1.4)]],
    [[(0.64, 0.9), (0.64, 0.1), (0.2, 0.64), (0.82, 0.64)]],
    [[(0.74, 0.1), (0.32, 0.1), (0.29, 0.46), *_make_arc(0.46, 0.66, 0.28, 0.24, 0.7, 1.4)]],
    [[(0.66, 0.1), (0.38, 0.36), (0.25, 0.66)], _make_arc(0.5, 0.68, 0.25, 0.22, 0, 1)],
    [[(0.22, 0.1), (0.78, 0.1), (0.42, 0.9)]],
    [_make_arc(0.5, 0.3, 0.21, 0.2, 0, 1), _make_arc(0.5, 0.7, 0.26, 0.2, 0, 1)],
    [_make_arc(0.48, 0.33, 0.24, 0.22, 0, 1), [(0.72, 0.34), (0.62, 0.9)]],
)


def draw_digit(digit: int, draws: NDArray[np.float64]) -> NDArray[np.float32]:
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


FORMAT = 1  # raise it when the same settings give other scenes
CLASSES = ("background", *map(str, range(10)))
NOISE, INK = 0.5, 0.4  # height of the noise, and the brightness from which on a pixel belongs to a digit
MNIST = {"train": "train", "test": "t10k"}

Digit = Callable[[NDArray[np.float64]], tuple[int, NDArray[np.float32]]]  # random numbers -> (digit, picture)


class SceneSource:
    """A source of pairs. A scene is a function of its number, the seed and the origin of the digits."""

    def __init__(self, data: ImageData) -> None:
        self.data = data
        self.channels, self.classes = 1, CLASSES

    def fingerprint(self) -> str:
        data = self.data
        settings = [data.digits, data.scenes, data.digits_per_scene, data.seed, data.size, data.test_fraction]
        files = [] if data.digits != "mnist" else [file for split in MNIST for file in self._mnist_files(split)]
        return hash_value(["scenes", FORMAT, settings, hash_files(files)])

    def pairs(self, split: str) -> Iterator[ImagePair]:
        digit, data = self._digits(split), self.data
        for number in range(self._count(split)):
            draws = make_number_stream(data.seed, split == "test", number)
            yield draw_scene(draws, digit, data.digits_per_scene, data.size)

    def _count(self, split: str) -> int:
        return self.data.scenes if split == "train" else max(1, round(self.data.scenes * self.data.test_fraction))

    def summarise(self) -> ImageSummary:
        if self.data.digits == "mnist":
            self._mnist_files("train")
        return ImageSummary(ImageKind(self.channels, self.classes), self._count("train"), self._count("test"))

    def _digits(self, split: str) -> Digit:
        if self.data.digits == "drawn":
            return lambda draws: (which := int(10 * draws[0]), draw_digit(which, draws[1 : 1 + DRAWS]))
        images, labels = self._mnist(split) if self.data.digits == "mnist" else _load_sklearn(split)

        def pick(draws: NDArray[np.float64]) -> tuple[int, NDArray[np.float32]]:
            index = int(draws[0] * len(images))
            return int(labels[index]), images[index].astype(np.float32) / 255

        return pick

    def _mnist_files(self, split: str) -> list[Path]:
        assert self.data.path is not None
        names = (f"{MNIST[split]}-{name}.gz" for name in ("images.idx3-ubyte", "labels.idx1-ubyte"))
        return [check_file(self.data.path.expanduser() / name, "data.path") for name in names]

    def _mnist(self, split: str) -> tuple[Pixels, Pixels]:
        files = self._mnist_files(split)
        try:
            pixels, classes = (gzip.decompress(read_bytes(file)) for file in files)
            images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, SIDE, SIDE)
            return images, np.frombuffer(classes, np.uint8, offset=8)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise invalid_data(f"data.path={files[0].parent}: MNIST's {split} files are damaged ({error})") from None


def _load_sklearn(split: str) -> tuple[Pixels, Pixels]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("data.digits=sklearn: type  pip install scikit-learn", code="not-installed") from None
    from PIL import Image

    found = load_digits()
    mine = (np.arange(len(found.target)) % 5 == 0) == (split == "test")
    small = (found.images[mine] * 15.9).astype(np.uint8)
    inner = (SIDE - 4, SIDE - 4)
    large = [np.pad(Image.fromarray(one).resize(inner, Image.Resampling.BICUBIC), 2) for one in small]
    return np.stack(large), found.target[mine].astype(np.uint8)


def make_number_stream(*words: int) -> Callable[[int], NDArray[np.float64]]:
    """Return a function that draws the next numbers from 0 to 1 of a stream that depends on these words alone."""
    state, taken = derive_key(*words), 0

    def take(count: int) -> NDArray[np.float64]:
        nonlocal taken
        taken += count
        return draw_fractions(state, taken - count, count)

    return take


def draw_scene(take: Callable[[int], NDArray[np.float64]], digit: Digit, count: int, size: int) -> ImagePair:
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
