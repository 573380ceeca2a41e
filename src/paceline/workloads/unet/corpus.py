"""Prepared images and masks: memory-mapped bytes, found in the cache by the hash of their content and settings.

Images may differ in size. Those of a split are concatenated, and so are its masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.cache import (
    ArrayWriter,
    DamagedEntry,
    add_seal,
    map_array,
    prepare_entry,
    read_facts,
    verify_entry,
    write_synced,
)
from paceline.data.files import invalid_data
from paceline.workload import LogFn

FORMAT = 1
META = "meta.json"
IGNORED = 255
"""Label of a pixel that does not count."""
SPLITS = ("train", "test")
ARRAYS = ("images", "masks", "sizes")

ImagePair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""An image [H, W, C] and its mask [H, W]."""


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
    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]
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
    channels: int
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit

    def __reduce__(self) -> tuple[Callable[[Path], ImageCorpus], tuple[Path]]:
        return open_image_corpus, (self.folder,)  # another process maps the same files instead of copying them


def prepare_images(source: PairSource, name: str, cache: Path, log: LogFn, verify: bool = True) -> ImageCorpus:
    """Return the corpus of a source from the cache, or build it; `verify` as for `TokenisedCorpus.prepare`."""
    fingerprint = source.fingerprint()
    folder = cache.expanduser().absolute() / f"images-{name}-{fingerprint[:16]}"
    return prepare_entry(folder, partial(_find, folder), lambda new: _build(source, fingerprint, new, log), log, verify)


def _find(folder: Path, log: LogFn, verify: bool) -> ImageCorpus | None:
    if not folder.exists():
        return None
    try:
        corpus = open_image_corpus(folder)
        if verify:
            verify_entry(folder, read_facts(folder / META)["files"])
        return corpus
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DamagedEntry) as damage:
        log(f"images: the cached {folder} is damaged ({damage}); preparing it again")
    return None


def open_image_corpus(folder: Path) -> ImageCorpus:
    meta = read_facts(folder / META)
    if meta["format"] != FORMAT:
        raise DamagedEntry(f"format {meta['format']}")
    for name, facts in meta["files"].items():
        if (folder / name).stat().st_size != facts["bytes"]:
            raise DamagedEntry(f"{name} has another size")
    splits = {}
    for split in SPLITS:
        pixels, labels, sizes = (map_array(folder / f"{split}.{name}.npy") for name in ARRAYS)
        sizes = sizes.reshape(-1, 2)
        areas = sizes.prod(axis=1)
        splits[split] = ImageSplit(pixels, labels, sizes, np.cumsum(areas) - areas, meta["channels"])
    return ImageCorpus(folder, meta["fingerprint"], meta["channels"], tuple(meta["classes"]), **splits)


def _build(source: PairSource, fingerprint: str, folder: Path, log: LogFn) -> None:
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
            raise invalid_data(f"the {split} split has no images; give more, or another data.test_fraction")
        counts.append(f"{sizes.length // 2:,} {'training' if split == 'train' else 'test'}")
        files |= {writer.path.name: writer.facts for writer in (images, masks, sizes)}
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "channels": source.channels,
        "classes": list(source.classes),
        "files": files,
    }
    write_synced(folder / META, json.dumps(add_seal(meta), indent=1).encode())
    log(f"images: {' and '.join(counts)} images in {len(source.classes)} classes prepared")
