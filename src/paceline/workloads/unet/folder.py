"""Folders of pairs: images/NAME.png with masks/NAME.png, also .tif, .jpg, .bmp and .npy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.registry import describe_error
from paceline.data.files import hash_files, hash_text, hash_value, missing_path_error
from paceline.data.npz import UNREADABLE
from paceline.errors import UserError
from paceline.io.safe_open import check_regular
from paceline.workloads.unet.corpus import IGNORED, ImageKind, ImagePair
from paceline.workloads.unet.samples import ImageSummary
from paceline.workloads.unet.sections import ImageData

if TYPE_CHECKING:
    from PIL import Image

MOST_SHOWN = 8
MOST_LOOKED_AT, MOST_PIXELS = 32, 1 << 24
"""Pairs, and pixels of their masks, that tell what the others are like."""
TURNED_TO_COLOUR, TURNED_TO_GREY = ("P", "RGBA", "CMYK", "YCbCr"), ("LA", "1")
KINDS = (".png", ".tif", ".tiff", ".npy", ".jpg", ".jpeg", ".bmp")


class FolderSource:
    """A source of pairs, see `paceline.workloads.unet.corpus`. A mask holds the number of a class for each pixel.

    255 is a pixel that does not count, unless masks hold nothing but 0 and 255: that is black and white, two classes.
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
                raise UserError(f"data.path={data.path}: one pair cannot be divided; type  data.test_path=FOLDER")
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
            self._judge(self._values())
        for image_file, mask_file in self.splits[split]:
            yield read_image(image_file), self._numbered(read_mask(mask_file))

    def summarise(self) -> ImageSummary:
        """By the headers of a few images, and what their masks hold."""
        sides: list[tuple[int, int]] = []
        values: set[int] = set()
        for number in np.unique(np.linspace(0, len(self.all) - 1, MOST_LOOKED_AT).astype(int)):
            image_file, mask_file = self.all[number]
            mask = read_mask(mask_file)
            self._same_kind(image_file, read_image_shape(image_file), mask)
            sides.append(mask.shape)
            values |= set(np.unique(mask).tolist())
            if sum(map(math.prod, sides)) > MOST_PIXELS:
                break
        classes = 2 if values <= {0, IGNORED} else max(2, max(values - {IGNORED}) + 1)
        tiles = np.mean([math.prod(-(-side // self.size) for side in one) for one in sides])
        said = f"{classes} classes, and images as large, as in {len(sides)} of {len(self.all):,} pairs"
        return ImageSummary(
            ImageKind(self.channels, tuple(map(str, range(classes)))),
            len(self.splits["train"]),
            round(len(self.splits["test"]) * float(tiles)),
            (said,) if len(sides) < len(self.all) else (),
        )

    def _values(self) -> set[int]:
        """What all masks hold."""
        values: set[int] = set()
        for image_file, mask_file in self.all:
            mask = read_mask(mask_file)
            self._same_kind(image_file, read_image(image_file).shape, mask)
            values |= set(np.unique(mask).tolist())
        return values

    def _same_kind(self, image_file: Path, shape: tuple[int, ...], mask: NDArray[np.uint8]) -> None:
        """As its mask, and as the images before it."""
        if shape[:2] != mask.shape:
            sides = " and its mask ".join(f"{width} × {height}" for height, width in (shape[:2], mask.shape))
            raise UserError(f"{image_file}: the image has {sides} pixels; they must be the same")
        if self.channels not in (0, shape[2]):
            raise UserError(
                f"{image_file} has {shape[2]} channels and {self.all[0][0].name} has {self.channels}; "
                "save all of them in grey or all in colour"
            )
        self.channels = shape[2]

    def _judge(self, values: set[int]) -> None:
        """Before anything is written: what classes there are, where all masks together hold these values."""
        self.black_and_white = values == {0, IGNORED}
        highest = 1 if self.black_and_white else max(values - {IGNORED}, default=0)
        if highest < 1:
            raise UserError(f"{self.all[0][1].parent}: all masks hold one class; there must be two to tell apart")
        if highest + 1 > 2 * len(values):
            shown = ", ".join(map(str, sorted(values)[:MOST_SHOWN])) + ", …" * (len(values) > MOST_SHOWN)
            raise UserError(
                f"{self.all[0][1].parent}: the masks hold the values {shown}; classes are numbered 0, 1, 2 and so on, "
                "without gaps, and 255 does not count"
            )
        self.classes = tuple(map(str, range(highest + 1)))

    def _numbered(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return (mask > 0).astype(np.uint8) if self.black_and_white else mask


def find_pairs(folder: Path, key: str) -> list[tuple[Path, Path]]:
    """The pairs of a folder, by name."""
    folder = folder.expanduser()
    images, masks = (_list_by_name(folder / part, key) for part in ("images", "masks"))
    if lonely := sorted(images.keys() ^ masks.keys()):
        has, lacks = ("images", "masks") if lonely[0] in images else ("masks", "images")
        more = f" ({len(lonely) - 1} more like it)" if len(lonely) > 1 else ""
        raise UserError(f"{key}={folder}: {has}/{lonely[0]} has no {lacks}/{lonely[0]} beside it{more}")
    return [(images[name], masks[name]) for name in sorted(images)]


def _list_by_name(folder: Path, key: str) -> dict[str, Path]:
    if not folder.parent.is_dir():
        raise missing_path_error(folder.parent, key, "folder")
    if not folder.is_dir():
        raise UserError(f"{key}={folder.parent}: there is no folder {folder.name}/ in it, for {folder.name}/NAME.png")
    found: dict[str, Path] = {}
    for file in sorted(f for f in folder.iterdir() if f.suffix.lower() in KINDS and not f.name.startswith(".")):
        if (other := found.setdefault(file.stem, file)) is not file:
            raise UserError(f"{key}={folder.parent}: {folder.name}/ has {other.name} and {file.name}; keep one of them")
    if not found:
        raise UserError(f"{key}={folder.parent}: {folder.name}/ holds none of {', '.join(KINDS)}")
    return found


def read_image(file: Path) -> NDArray[np.uint8]:
    """[H, W, C], where C is 1 for grey and 3 for colour; another number only from .npy."""
    pixels = _read(file, colours=True)
    if pixels.dtype != np.uint8:
        raise UserError(f"{file} holds {pixels.dtype} values; images of 8 bits are read: scale it to 0 … 255, as uint8")
    return pixels if pixels.ndim == 3 else pixels[..., None]


def read_mask(file: Path) -> NDArray[np.uint8]:
    if file.suffix.lower() in (".jpg", ".jpeg"):
        raise UserError(f"{file}: JPEG changes the numbers of classes at every edge; save masks as .png")
    mask = _read(file, colours=False)
    if mask.ndim != 2 or not (mask.dtype == bool or np.issubdtype(mask.dtype, np.integer)):
        raise UserError(f"{file}: a mask has one class number for each pixel, this has {list(mask.shape)} {mask.dtype}")
    if mask.size and not 0 <= int(mask.min()) <= int(mask.max()) <= IGNORED:
        raise UserError(f"{file}: classes are numbered from 0 to 254, this mask goes from {mask.min()} to {mask.max()}")
    return mask.astype(np.uint8)


def read_image_shape(file: Path) -> tuple[int, ...]:
    """Of what `read_image` would give, by the file's header."""
    with _open_image(file) as found:
        if isinstance(found, np.ndarray):
            return (*found.shape, 1)[:3]
        return found.height, found.width, 3 if found.mode in (*TURNED_TO_COLOUR, "RGB") else 1


def _read(file: Path, *, colours: bool) -> NDArray[Any]:
    with _open_image(file) as found:
        if isinstance(found, np.ndarray):
            return np.array(found)
        if colours and found.mode in (*TURNED_TO_COLOUR, *TURNED_TO_GREY):
            found = found.convert("RGB" if found.mode in TURNED_TO_COLOUR else "L")
        return np.asarray(found)


@contextmanager
def _open_image(file: Path) -> Iterator[NDArray[Any] | Image.Image]:
    """An array that is mapped, or a picture of which only the header has been read; refused if it is neither."""
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
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; name the images in it:  {file}/*.png") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {str(file)!r}") from None
    except (OSError, *UNREADABLE, Image.DecompressionBombError) as error:
        raise UserError(f"{file} cannot be read as an image: {describe_error(error)}") from None
