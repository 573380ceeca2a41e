"""Prepared images and masks: memory-mapped bytes, found in the cache by the hash of their content and settings.

Images may differ in size. Those of a split lie end to end, and so do its masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data import cache
from paceline.data.cache import ArrayWriter, LogFn, map_array, write_synced
from paceline.errors import UserError

FORMAT = 1
IGNORED = 255
"""In a mask: a pixel that counts nothing."""
SPLITS = ("train", "test")
ARRAYS = ("images", "masks", "sizes")

ImagePair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""An image [H, W, C] and its mask [H, W]."""


@dataclass(frozen=True)
class ImageKind:
    """What a model must know of its images."""

    channels: int
    classes: tuple[str, ...]


class PairSource(Protocol):
    """Where pairs come from. What `channels` and `classes` say is known once all pairs were read."""

    channels: int
    classes: tuple[str, ...]

    def fingerprint(self) -> str: ...

    def pairs(self, split: str) -> Iterator[ImagePair]: ...


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """One split. Read-only."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    """n × 2: height and width."""
    begins: NDArray[np.int64]
    """n: the first pixel of each."""
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
    channels: int
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit

    def __reduce__(self) -> tuple[Callable[[Path], ImageCorpus], tuple[Path]]:
        return open_image_corpus, (self.folder,)  # another process maps the same files instead of copying them


def prepare_images(source: PairSource, name: str, place: Path, say: LogFn) -> ImageCorpus:
    """The corpus of a source: from the cache, or built now."""
    fingerprint = source.fingerprint()
    folder = place.expanduser().absolute() / f"images-{name}-{fingerprint[:16]}"
    if (found := _find(folder, say)) is not None:
        return found
    with cache.lock_entry(folder, say):
        if (found := _find(folder)) is not None:  # whoever held the lock before may have built it
            return found
        with cache.create_entry(folder) as new:
            _build(source, fingerprint, new, say)
        return open_image_corpus(folder)


def _find(folder: Path, say: LogFn = lambda line: None) -> ImageCorpus | None:
    """None where there is nothing, or nothing whole."""
    if not folder.exists():
        return None
    try:
        corpus = open_image_corpus(folder)
        cache.verify_entry(folder, _read_meta(folder)["files"])
        return corpus
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, cache.DamagedEntry) as damage:
        say(f"images: the cached {folder} is damaged ({damage}); preparing it again")
    return None


def _read_meta(folder: Path) -> dict[str, Any]:
    return cache.read_facts(folder / "meta.json")


def open_image_corpus(folder: Path) -> ImageCorpus:
    meta = _read_meta(folder)
    if type(meta["channels"]) is not int or not all(isinstance(name, str) for name in meta["classes"]):
        raise ValueError("its values are not those of images")
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}")
    for name, facts in meta["files"].items():
        if (folder / name).stat().st_size != facts["bytes"]:
            raise ValueError(f"{name} is not whole")
    splits = {}
    for split in SPLITS:
        pixels, labels, sizes = (map_array(folder / f"{split}.{name}.npy") for name in ARRAYS)
        sizes = sizes.reshape(-1, 2)
        areas = sizes.prod(axis=1)
        splits[split] = ImageSplit(pixels, labels, sizes, np.cumsum(areas) - areas, meta["channels"])
    return ImageCorpus(folder, meta["fingerprint"], meta["channels"], tuple(meta["classes"]), **splits)


def _build(source: PairSource, fingerprint: str, folder: Path, say: LogFn) -> None:
    files: dict[str, Any] = {}
    counts = []
    for split in SPLITS:
        paths = [folder / f"{split}.{name}.npy" for name in ARRAYS]
        with (
            ArrayWriter(paths[0], np.uint8) as images,
            ArrayWriter(paths[1], np.uint8) as masks,
            ArrayWriter(paths[2], np.int64) as sizes,
        ):
            for image, mask in source.pairs(split):
                images.append(image.reshape(-1))
                masks.append(mask.reshape(-1))
                sizes.append(np.array(mask.shape))
        if not sizes.length:
            raise UserError(f"the {split} split has no images; give more of them, or another data.test_fraction")
        counts.append(f"{sizes.length // 2:,} {'training' if split == 'train' else 'test'}")
        files |= {writer.path.name: writer.facts for writer in (images, masks, sizes)}
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "channels": source.channels,
        "classes": list(source.classes),
        "files": files,
    }
    write_synced(folder / "meta.json", json.dumps(cache.add_seal(meta), indent=1).encode())
    say(f"images: {' and '.join(counts)} images in {len(source.classes)} classes prepared")
