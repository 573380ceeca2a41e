"""Folders of images by class: PATH/CLASS/NAME.png, read when they are needed and brought to the model's size."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.registry import describe_error
from paceline.data.files import hash_files, hash_text, invalid_data, missing_path_error
from paceline.errors import UserError
from paceline.io.files import check_regular, hash_value, read_json
from paceline.workloads.transformers.samples import Batch

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
USUAL = 0.5  # mean and deviation of a channel, from 0 to 1, where no file says them


@dataclass(frozen=True)
class PixelFormat:
    """What a model takes: channels, height, width; the mean and deviation of each channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, config: Any, file: Path) -> "PixelFormat":
        """Read sizes from the model's config, the rest from its preprocessor_config.json if there is one."""
        size, channels = getattr(config, "image_size", 224), int(getattr(config, "num_channels", 3))
        height, width = size if isinstance(size, list | tuple) else (size, size)
        given = read_json(file) if file.is_file() else {}
        try:
            usual = [USUAL] * channels
            mean, std = (tuple(map(float, given.get(key) or usual)) for key in ("image_mean", "image_std"))
            if not len(mean) == len(std) == channels or min(std) <= 0:
                raise ValueError(f"image_mean and image_std must have {channels} values")
            return cls(channels, int(height), int(width), mean, std)
        except (TypeError, ValueError) as error:
            raise invalid_data(f"{file}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        size = {"height": self.height, "width": self.width}
        steps = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        values = {"image_mean": list(self.mean), "image_std": list(self.std)}
        return {"image_processor_type": "ViTImageProcessor", "size": size, "resample": 2, **steps, **values}

    def read(self, file: Any) -> Tensor:
        """Return (channels, height, width) of an image file, or of an array with 8 bits."""
        from PIL import Image

        try:
            if isinstance(file, np.ndarray):
                picture: Any = Image.fromarray(file)
            else:
                check_regular(Path(file))
                picture = Image.open(file)
            with picture:
                small = picture.convert("RGB" if self.channels == 3 else "L").resize((self.width, self.height), 2)
        except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
            raise invalid_data(f"{str(file)[:80]} cannot be read as an image: {describe_error(error)}") from None
        pixels = np.asarray(small, np.float32).reshape(self.height, self.width, self.channels) / 255
        normal = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(normal.transpose(2, 0, 1).copy())


class ImageFolders:
    """Image files by class; without `data.test_path` some are held out by a hash of their names."""

    def __init__(self, data: Any) -> None:
        if data.path is None:
            hint = "source images reads PATH/CLASS/NAME.png; type  data.path=FOLDER"
            raise UserError(f"data.path: not given; {hint}", code="missing-value", key="data.path")
        found = _list_images(data.path, "data.path")
        self.classes = tuple(sorted({file.parent.name for file in found}))
        if len(self.classes) < 2:
            raise invalid_data(f"data.path={data.path}: it needs two folders of images or more, one for each class")
        if data.test_path is not None:
            train, self.test = found, _list_images(data.test_path, "data.test_path")
        else:
            order = sorted(found, key=lambda file: hash_text(f"{file.parent.name}/{file.name}"))
            count = min(max(1, round(data.test_fraction * len(found))), len(found) - 1)
            train, self.test = sorted(order[count:]), sorted(order[:count])
        self.train = train[: data.limit or None]
        if unknown := sorted({file.parent.name for file in self.test} - {*self.classes}):
            raise invalid_data(f"data.test_path: the class {unknown[0]!r} is not in data.path", "data.test_path")

    @cached_property
    def fingerprint(self) -> str:
        counts = [len(self.train), len(self.test)]
        return hash_value(["images", counts, self.classes, hash_files([*self.train, *self.test])])

    def samples(self, split: str, pixels: PixelFormat) -> "ImageSamples":
        return ImageSamples(self.train if split == "train" else self.test, self.classes, pixels)


def _list_images(folder: Path, key: str) -> list[Path]:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise missing_path_error(folder, key, "folder")
    found = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise invalid_data(f"{key}={folder}: no images; put them in folders by class, as {folder}/CLASS/NAME.png", key)
    return found


@dataclass(frozen=True, eq=False)
class ImageSamples:
    files: list[Path]
    classes: tuple[str, ...]
    pixels: PixelFormat

    def __len__(self) -> int:
        return len(self.files)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids))

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Batch:
        files = [self.files[number] for number in ids]
        labels = torch.tensor([self.classes.index(file.parent.name) for file in files])
        return Batch({"pixel_values": torch.stack([self.pixels.read(file) for file in files])}, labels)
