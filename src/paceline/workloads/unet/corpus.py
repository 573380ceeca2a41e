"""Prepared images and masks: memory-mapped bytes, found in the cache by the hash of their content and settings.

Images may differ in size. Those of a split are concatenated, and so are its masks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.cache import (
    ArrayWriter,
    DamagedEntry,
    map_array,
    prepare_entry,
    read_facts,
    write_facts,
)
from paceline.data.files import invalid_data
from paceline.data.order import draw_fractions
from paceline.io.files import expand_cache
from paceline.workload import LogFn
from paceline.workloads.unet.sections import ImageData

FORMAT = 1
META = "meta.json"
IGNORED = 255  # label of a pixel that does not count
SPLITS = ("train", "test")
ARRAYS = ("images", "masks", "sizes")

Pixels = NDArray[np.uint8]
ImagePair = tuple[Pixels, Pixels]  # an image [H, W, C] and its mask [H, W]


@dataclass(frozen=True)
class ImageKind:
    channels: int
    classes: tuple[str, ...]


class PairSource(Protocol):
    """A source of image pairs. Its `channels` and `classes` may be known only once all pairs are read."""

    channels: int
    classes: tuple[str, ...]

    def fingerprint(self) -> str: ...

    def pairs(self, split: str) -> Iterator[ImagePair]: ...


@dataclass(frozen=True, eq=False)
class ImageSplit:
    pixels: Pixels
    labels: Pixels
    sizes: NDArray[np.int64]
    begins: NDArray[np.int64]
    channels: int

    def __len__(self) -> int:
        return len(self.sizes)

    def pair(self, index: int) -> ImagePair:
        height, width = (int(side) for side in self.sizes[index])
        begin, end = int(self.begins[index]), int(self.begins[index]) + height * width
        image = self.pixels[begin * self.channels : end * self.channels].reshape(height, width, self.channels)
        return image, self.labels[begin:end].reshape(height, width)


@dataclass(frozen=True, eq=False)
class ImageCorpus:
    folder: Path
    fingerprint: str
    kind: ImageKind
    train: ImageSplit
    test: ImageSplit

    def __reduce__(self) -> "tuple[Callable[[Path], ImageCorpus], tuple[Path]]":
        return open_image_corpus, (self.folder,)  # another process maps the same files instead of copying them


def prepare_images(source: PairSource, name: str, cache: Path, log: LogFn, verify: bool = True) -> ImageCorpus:
    """Return the corpus from the cache, or build it; `verify` as for `TokenisedCorpus.prepare`."""
    fingerprint = source.fingerprint()
    folder = expand_cache(cache).absolute() / f"images-{name}-{fingerprint[:16]}"
    return prepare_entry(folder, open_image_corpus, partial(_build_entry, source, fingerprint, log), log, verify)


def open_image_corpus(folder: Path, verify: bool = False) -> ImageCorpus:
    meta = read_facts(folder / META, verify)
    if meta["format"] != FORMAT:
        raise DamagedEntry(f"format {meta['format']}")
    splits = {}
    for split in SPLITS:
        pixels, labels, sizes = (map_array(folder / f"{split}.{name}.npy") for name in ARRAYS)
        sizes = sizes.reshape(-1, 2)
        areas = sizes.prod(axis=1)
        splits[split] = ImageSplit(pixels, labels, sizes, np.cumsum(areas) - areas, meta["channels"])
    return ImageCorpus(folder, meta["fingerprint"], ImageKind(meta["channels"], tuple(meta["classes"])), **splits)


def _build_entry(source: PairSource, fingerprint: str, log: LogFn, folder: Path) -> None:
    files: dict[str, Any] = {}
    counts = []
    for split in SPLITS:
        with ExitStack() as stack:
            paths = [folder / f"{split}.{name}.npy" for name in ARRAYS]
            kinds = zip(paths, (np.uint8, np.uint8, np.int64), strict=True)
            writers = [stack.enter_context(ArrayWriter(path, kind)) for path, kind in kinds]
            for image, mask in source.pairs(split):
                for writer, values in zip(writers, (image, mask, np.array(mask.shape)), strict=True):
                    writer.append(values.reshape(-1))
        if not (count := writers[-1].length // 2):
            raise invalid_data(f"the {split} split has no images; give more, or another data.test_fraction")
        counts.append(f"{count:,} {'training' if split == 'train' else 'test'}")
        files |= {writer.path.name: writer.facts for writer in writers}
    about = {"format": FORMAT, "fingerprint": fingerprint, "channels": source.channels, "classes": source.classes}
    write_facts(folder / META, {**about, "files": files})
    log(f"images: {' and '.join(counts)} images in {len(source.classes)} classes prepared")


ImageBatch = tuple[Tensor, Tensor]  # images [B, C, size, size] and masks [B, size, size], as bytes


@dataclass(frozen=True)
class ImageSummary:
    kind: ImageKind
    train: int
    tiles: int  # of the held-out images
    assumptions: tuple[str, ...] = ()


TOP, LEFT, ACROSS, UPSIDE_DOWN, BRIGHT = range(CHANGES := 5)  # what a key decides of a crop


class Tiles:
    """Tiles of one size; the last of a row or column is moved back into the image, and what was shown does not count.

    Pictures are of tiles that show nothing twice.
    """

    def __init__(self, images: ImageSplit, size: int) -> None:
        self.images, self.size = images, size
        self.places = [
            (index, *offsets)
            for index, (height, width) in enumerate(images.sizes.tolist())
            for offsets in iter_tiles(height, width, size)
        ]
        self.pictured = np.array([i for i, (_, _, above, _, before) in enumerate(self.places) if not above + before])

    def __len__(self) -> int:
        return len(self.places)

    def cost(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones(len(ids))

    def pair(self, index: int, key: int) -> ImagePair:
        number, top, seen_above, left, seen_before = self.places[index]
        image, mask = cut_window(*self.images.pair(number), top, left, self.size)
        mask[:seen_above] = IGNORED
        mask[:, :seen_before] = IGNORED
        return image, mask

    def batch(self, ids: NDArray[np.int64], keys: NDArray[np.int64]) -> ImageBatch:
        images = np.empty((len(ids), self.images.channels, self.size, self.size), np.uint8)
        masks = np.empty((len(ids), self.size, self.size), np.uint8)
        for row, (index, key) in enumerate(zip(ids.tolist(), keys.tolist(), strict=True)):
            image, masks[row] = self.pair(index, key)
            images[row] = image.transpose(2, 0, 1)
        return torch.from_numpy(images), torch.from_numpy(masks)


class Crops(Tiles):
    """A random crop of each image, drawn from its key: the same on any rank, another one in the next epoch."""

    def __init__(self, images: ImageSplit, data: ImageData) -> None:
        self.images, self.size, self.data = images, data.size, data

    def __len__(self) -> int:
        return len(self.images)

    def pair(self, index: int, key: int) -> ImagePair:
        drawn = draw_fractions(np.uint64(key), 0, CHANGES)
        image, mask = self.images.pair(index)
        free = [max(0, side - self.size) + 1 for side in mask.shape]
        image, mask = cut_window(image, mask, int(drawn[TOP] * free[0]), int(drawn[LEFT] * free[1]), self.size)
        if self.data.flip != "none" and drawn[ACROSS] < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        if self.data.flip == "both" and drawn[UPSIDE_DOWN] < 0.5:
            image, mask = image[::-1], mask[::-1]
        if self.data.brightness:
            factor = 1 + self.data.brightness * (2 * drawn[BRIGHT] - 1)
            image = np.clip(image * factor, 0, 255).astype(np.uint8)
        return image, mask


class WholeImages(Crops):
    """Images that have the size of a sample, without random changes: all can be kept on the device."""

    def resident(self) -> ImageBatch:
        everything = np.arange(len(self))
        return self.batch(everything, np.zeros_like(everything))


def make_crops(images: ImageSplit, data: ImageData) -> Crops:
    random = data.flip != "none" or data.brightness > 0 or bool((images.sizes > data.size).any())
    return Crops(images, data) if random else WholeImages(images, data)


def iter_tiles(height: int, width: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (top, rows that the tile above has shown, left, columns that the tile before has shown)."""
    for top in range(0, max(height, 1), size):
        for left in range(0, max(width, 1), size):
            up, back = max(0, min(top, height - size)), max(0, min(left, width - size))
            yield up, top - up, back, left - back


def cut_window(image: Pixels, mask: Pixels, top: int, left: int, size: int) -> ImagePair:
    """Copy a square; beyond the edge of the image its pixels are black and do not count."""
    square = np.zeros((size, size, image.shape[2]), np.uint8)
    labels = np.full((size, size), IGNORED, np.uint8)
    part = image[top : top + size, left : left + size]
    square[: part.shape[0], : part.shape[1]] = part
    labels[: part.shape[0], : part.shape[1]] = mask[top : top + size, left : left + size]
    return square, labels
