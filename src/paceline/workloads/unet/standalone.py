"""A segmentation of images that was trained with Paceline, and does not need it: torch, safetensors and pillow do.

    from load import load
    segmentation = load()                      # of the folder that this file is in
    segmentation.predict("image.png")          # an array [height, width] with the number of a class for each pixel

python load.py image.png mask.png
"""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ExportedUNet(nn.Module):
    """Logits (B, classes, H, W) of images (B, C, H, W) with values from 0 to 255."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        widths = [config["width"] * 2**level for level in range(config["depth"] + 1)]
        levels = list(pairwise(widths))[::-1]
        given = [config["channels"], *widths]
        self.down = nn.ModuleList(self.build_block(a, b) for a, b in zip(given, widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in levels)
        self.join = nn.ModuleList(self.build_block(2 * a, a) for a, _ in levels)
        self.head = nn.Conv2d(widths[0], len(config["classes"]), 1)

    def build_block(self, given: int, channels: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for c in (given, channels):
            norm = self.build_norm(self.config["norm"], channels)
            layers += [nn.Conv2d(c, channels, 3, padding=1, bias=False), norm, nn.ReLU()]
        return nn.Sequential(*layers)

    def build_norm(self, kind: str, channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if kind == "sync_batch" else nn.GroupNorm(math.gcd(8, channels), channels)

    def scale(self, images: Tensor) -> Tensor:
        return images.to(self.head.weight.dtype) / 127.5 - 1

    def forward(self, images: Tensor) -> Tensor:
        x, levels = self.scale(images), []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            levels.append(x)
        for up, join, across in zip(self.up, self.join, levels[-2::-1], strict=True):
            x = join(torch.cat([up(x), across], 1))
        return self.head(x)

    @torch.no_grad()
    def predict(self, image: str | Path | np.ndarray) -> np.ndarray:
        """Tile by tile, of the size that the model was trained on; the last ones are moved back into the image."""
        pixels = image if isinstance(image, np.ndarray) else self._read_image(image)
        whole = torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1).copy())
        size, (height, width) = self.config["size"], whole.shape[1:]
        mask = np.zeros((height, width), np.uint8)
        for row in range(0, height, size):
            for column in range(0, width, size):
                top, left = max(0, min(row, height - size)), max(0, min(column, width - size))
                part = whole[:, top : top + size, left : left + size]
                padded = F.pad(part, (0, size - part.shape[2], 0, size - part.shape[1]))
                found = self(padded[None])[0].argmax(0).numpy()
                mask[row : row + size, column : column + size] = found[
                    row - top : part.shape[1], column - left : part.shape[2]
                ]
        return mask

    def _read_image(self, file: str | Path) -> np.ndarray:
        from PIL import Image

        with Image.open(file) as picture:
            return np.asarray(picture.convert("L" if self.config["channels"] == 1 else "RGB"))


def load(folder: str | Path = Path(__file__).parent) -> ExportedUNet:
    from safetensors.torch import load_file

    folder = Path(folder)
    model = ExportedUNet(json.loads((folder / "config.json").read_text("utf-8")))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


if __name__ == "__main__":
    from PIL import Image

    Image.fromarray(load().predict(sys.argv[1])).save(sys.argv[2])
