"""A folder of images as a data set: the name of a sub-folder is the class of its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.data.files import invalid_data, missing_path_error
from paceline.errors import RunFailed
from paceline.io.files import check_regular

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}

Pixels = tuple[int, int]  # height and width


@dataclass(frozen=True)
class ImageFolder:
    """Item i is (image, class): a tensor of channels × height × width from 0 to 1, or the result of `transform`."""

    files: Sequence[Path]
    labels: Sequence[int]
    classes: Sequence[str]
    mode: str
    size: Pixels | None
    transform: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image, ImageOps

        file = self.files[index]
        try:
            check_regular(file)
            with Image.open(file) as opened:
                image = opened.convert(self.mode)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = str(error).splitlines()[0].split(" '")[0]
            raise RunFailed(f"{file}: not a readable image ({reason}); copy it again or remove it") from None
        if self.size is not None:
            image = ImageOps.fit(image, self.size[::-1])
        if self.transform is not None:
            return self.transform(image), self.labels[index]
        pixels = np.asarray(image, np.float32) / 255
        channels_first = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()
        return torch.from_numpy(channels_first), self.labels[index]


def image_folder(
    path: str | Path,
    size: int | Pixels | None = None,
    mode: str = "RGB",
    transform: Callable[[Any], Any] | None = None,
    classes: Sequence[str] | None = None,
) -> ImageFolder:
    """Return the images below a folder as a data set; each is in a sub-folder with the name of its class.

    `size` (pixels of a side, or height and width) scales and crops images. `mode` is Pillow's: "RGB", or "L" for grey.
    `transform` gets the Pillow image. `classes` are those of another split, so that both number them alike.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise missing_path_error(folder, "image_folder", "folder")
    below = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    names = list(below if classes is None else classes)
    if unknown := [name for name in below if name not in names]:
        raise invalid_data(f"image_folder={folder}: {unknown[0]!r} is not one of the classes {', '.join(names)}")
    files = [(file, number) for number, name in enumerate(names) for file in sorted((folder / name).rglob("*"))]
    files = [(file, number) for file, number in files if file.suffix.lower() in SUFFIXES]
    if not files:
        raise invalid_data(f"image_folder={folder}: no images; put them in one folder per class, as  cat/1.png")
    paths, labels = map(list, zip(*files, strict=True))
    return ImageFolder(paths, labels, names, mode, (size, size) if isinstance(size, int) else size, transform)
