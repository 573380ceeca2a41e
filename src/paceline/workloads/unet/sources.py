"""Where pictures and masks come from: scenes of digits over noise, made on the spot, or folders of pairs."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.registry import describe_error
from paceline.data.files import hash_files, hash_text, invalid_data, missing_path_error
from paceline.data.npz import UNREADABLE
from paceline.data.order import derive_key, draw_fractions
from paceline.errors import join_names
from paceline.io.files import check_regular, hash_value
from paceline.workloads.unet.corpus import IGNORED, ImageKind, ImagePair, ImageSummary, Pixels
from paceline.workloads.unet.sections import ImageData

if TYPE_CHECKING:
    from PIL import Image

SIDE = 28
DRAWS = 8  # random numbers for the shape of a digit
SCENE_DRAWS = 1 + DRAWS + 3  # for a digit: which, its shape, where it is and how bright

Line = list[list[float]]
MAX_SUMMARISED, MAX_PIXELS = 32, 1 << 24  # pairs, and pixels of their masks, by which a plan judges all
TO_COLOUR, TO_GREY = ("P", "RGBA", "CMYK", "YCbCr"), ("LA", "1")
KINDS = (".png", ".tif", ".tiff", ".npy", ".jpg", ".jpeg", ".bmp")


DIGITS: list[list[Line]] = json.loads(Path(__file__).with_name("digits.json").read_text("utf-8"))
"""The strokes of each digit, in a square of side 1."""


def draw_digit(digit: int, draws: NDArray[np.float64]) -> NDArray[np.float32]:
    """Draw a digit on SIDE × SIDE pixels, from 0 to 1: turned, slanted, stretched, thick or thin, by the numbers."""
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


class SceneSource:
    """A source of pairs. A scene is a function of its number and the seed."""

    def __init__(self, data: ImageData) -> None:
        self.data = data
        self.channels, self.classes = 1, CLASSES

    def fingerprint(self) -> str:
        data = self.data
        settings = ["drawn", data.scenes, data.digits_per_scene, data.seed, data.size, data.test_fraction]
        return hash_value(["scenes", FORMAT, settings, hash_files(())])  # as runs have recorded it

    def pairs(self, split: str) -> Iterator[ImagePair]:
        data = self.data
        for number in range(self._count(split)):
            yield draw_scene(derive_key(data.seed, split == "test", number), data.digits_per_scene, data.size)

    def _count(self, split: str) -> int:
        return self.data.scenes if split == "train" else max(1, round(self.data.scenes * self.data.test_fraction))

    def summarise(self) -> ImageSummary:
        return ImageSummary(ImageKind(self.channels, self.classes), self._count("train"), self._count("test"))


def draw_scene(key: np.uint64, count: int, size: int) -> ImagePair:
    """Draw an image of so many digits and its mask; all that is random is drawn from the key."""
    image, mask = np.zeros((size, size), np.float32), np.zeros((size, size), np.uint8)
    drawn = draw_fractions(key, 0, count * SCENE_DRAWS + size * size)
    of_digits, of_pixels = drawn[: count * SCENE_DRAWS].reshape(count, SCENE_DRAWS), drawn[count * SCENE_DRAWS :]
    for which, *shape, down, right, bright in of_digits:
        digit = int(10 * which)
        picture = draw_digit(digit, np.array(shape))
        top, left = int(down * (size - SIDE + 1)), int(right * (size - SIDE + 1))
        place = slice(top, top + SIDE), slice(left, left + SIDE)
        ink = picture > INK
        image[place] = np.where(ink, picture * (0.6 + 0.4 * bright), image[place])
        mask[place] = np.where(ink, digit + 1, mask[place])
    noise = NOISE * of_pixels.reshape(size, size)
    return (255 * np.clip(image * (1 - NOISE / 2) + noise / 2, 0, 1)).astype(np.uint8)[..., None], mask


class FolderSource:
    """A source of pairs. A mask has the number of a class for each pixel.

    255 is a pixel that does not count, unless masks have nothing but 0 and 255: that is black and white, two classes.
    """

    def __init__(self, data: ImageData) -> None:
        assert data.path is not None
        found = find_pairs(data.path, "data.path")
        if data.test_path is not None:
            self.splits = {"train": found, "test": find_pairs(data.test_path, "data.test_path")}
        else:
            by_hash = sorted(found, key=lambda pair: hash_text(pair[0].stem))
            held_out = min(max(1, round(data.test_fraction * len(found))), len(found) - 1)
            if held_out < 1:
                raise invalid_data(f"data.path={data.path}: one pair cannot be divided; type  data.test_path=FOLDER")
            self.splits = {"train": sorted(by_hash[held_out:]), "test": sorted(by_hash[:held_out])}
        self.all = [pair for pairs in self.splits.values() for pair in pairs]
        self.size = data.size
        self.channels = 0
        self.classes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        counts = [len(pairs) for pairs in self.splits.values()]
        return hash_value(["folder", counts, hash_files(file for pair in self.all for file in pair)])

    def pairs(self, split: str) -> Iterator[ImagePair]:
        if not self.classes:
            self._find_classes()
        for image_file, mask_file in self.splits[split]:
            mask = read_mask(mask_file)
            yield read_image(image_file), (mask > 0).astype(np.uint8) if self.black_and_white else mask

    def summarise(self) -> ImageSummary:
        sides: list[tuple[int, int]] = []
        values: set[int] = set()
        for number in np.unique(np.linspace(0, len(self.all) - 1, MAX_SUMMARISED).astype(int)):
            image_file, mask_file = self.all[number]
            mask = read_mask(mask_file)
            self._check_alike(image_file, read_image(image_file).shape, mask)
            sides.append(mask.shape)
            values |= set(np.unique(mask).tolist())
            if sum(map(math.prod, sides)) > MAX_PIXELS:
                break
        classes = 2 if values <= {0, IGNORED} else max(2, max(values - {IGNORED}) + 1)
        tiles = np.mean([math.prod(-(-side // self.size) for side in pair) for pair in sides])
        assumed = f"{classes} classes, and images as large, as in {len(sides)} of {len(self.all):,} pairs"
        return ImageSummary(
            ImageKind(self.channels, tuple(map(str, range(classes)))),
            len(self.splits["train"]),
            round(len(self.splits["test"]) * float(tiles)),
            (assumed,) if len(sides) < len(self.all) else (),
        )

    def _check_alike(self, image_file: Path, shape: tuple[int, ...], mask: Pixels) -> None:
        if shape[:2] != mask.shape:
            sides = " and its mask ".join(f"{width} × {height}" for height, width in (shape[:2], mask.shape))
            raise invalid_data(f"{image_file}: the image has {sides} pixels; they must be the same")
        if self.channels not in (0, shape[2]):
            raise invalid_data(f"{image_file} has {shape[2]} channels, others {self.channels}; convert one of them")
        self.channels = shape[2]

    def _find_classes(self) -> None:
        values: set[int] = set()
        for image_file, mask_file in self.all:
            mask = read_mask(mask_file)
            self._check_alike(image_file, read_image(image_file).shape, mask)
            values |= set(np.unique(mask).tolist())
        folder = self.all[0][1].parent
        self.black_and_white = values == {0, IGNORED}
        highest = 1 if self.black_and_white else max(values - {IGNORED}, default=0)
        if highest < 1:
            raise invalid_data(f"{folder}: all masks have one class; there must be two")
        if highest + 1 > 2 * len(values):
            shown = join_names([*map(str, sorted(values))], 8)
            raise invalid_data(f"{folder}: the masks have the values {shown}; number classes 0, 1, 2 without gaps")
        self.classes = tuple(map(str, range(highest + 1)))


def find_pairs(folder: Path, key: str) -> list[tuple[Path, Path]]:
    folder = folder.expanduser()
    images, masks = (_list_by_name(folder / part, key) for part in ("images", "masks"))
    if lonely := sorted(images.keys() ^ masks.keys()):
        raise invalid_data(f"{key}={folder}: only one of image and mask for {join_names(lonely)}", key)
    return [(images[name], masks[name]) for name in sorted(images)]


def _list_by_name(folder: Path, key: str) -> dict[str, Path]:
    if not folder.parent.is_dir():
        raise missing_path_error(folder.parent, key, "folder")
    given, name = f"{key}={folder.parent}", f"{folder.name}/"
    if not folder.is_dir():
        raise invalid_data(f"{given}: it has no folder {name} for {name}NAME.png", key)
    found: dict[str, Path] = {}
    for file in sorted(f for f in folder.iterdir() if f.suffix.lower() in KINDS and not f.name.startswith(".")):
        if (other := found.setdefault(file.stem, file)) is not file:
            raise invalid_data(f"{given}: {name} has {other.name} and {file.name}; keep one of them", key)
    if not found:
        raise invalid_data(f"{given}: {name} has none of {', '.join(KINDS)}", key)
    return found


def read_image(file: Path) -> Pixels:
    """Read [H, W, C], where C is 1 for grey and 3 for colour; another number only from .npy."""
    pixels = _read_pixels(file, colours=True)
    if pixels.dtype != np.uint8:
        raise invalid_data(f"{file} has {pixels.dtype} values; images of 8 bits are read: scale to 0 … 255 as uint8")
    return pixels if pixels.ndim == 3 else pixels[..., None]


def read_mask(file: Path) -> Pixels:
    if file.suffix.lower() in (".jpg", ".jpeg"):
        raise invalid_data(f"{file}: JPEG changes the numbers of classes at every edge; save masks as .png")
    mask = _read_pixels(file, colours=False)
    if mask.ndim != 2 or not (mask.dtype == bool or np.issubdtype(mask.dtype, np.integer)):
        raise invalid_data(f"{file}: expected one class number per pixel, found {list(mask.shape)} {mask.dtype}")
    if mask.size and not 0 <= int(mask.min()) <= int(mask.max()) <= IGNORED:
        raise invalid_data(f"{file}: classes are 0 to 254, this mask goes from {mask.min()} to {mask.max()}")
    return mask.astype(np.uint8)


def _read_pixels(file: Path, *, colours: bool) -> NDArray[Any]:
    with _open_image(file) as found:
        if isinstance(found, np.ndarray):
            return np.array(found)
        if colours and found.mode in (*TO_COLOUR, *TO_GREY):
            found = found.convert("RGB" if found.mode in TO_COLOUR else "L")
        return np.asarray(found)


@contextmanager
def _open_image(file: Path) -> "Iterator[NDArray[Any] | Image.Image]":
    from PIL import Image

    try:
        check_regular(file)
        if file.suffix.lower() == ".npy":
            found: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
            if found.ndim not in (2, 3):
                raise ValueError(f"an array of shape {list(found.shape)}")
            yield found
        else:
            with Image.open(file) as picture:
                yield picture
    except (OSError, *UNREADABLE, Image.DecompressionBombError) as error:
        raise invalid_data(f"{file} cannot be read as an image: {describe_error(error)}") from None
