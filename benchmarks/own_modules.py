"""Six modules as people write them, which the planner measures on fake tensors: for `plan_gpu.py --set own`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload

SAMPLES, CLASSES, WORDS, LENGTH = 20_000, 10, 5_000, 64
Labelled = tuple[Tensor, Tensor]


class Images(Workload):
    """Random images of 3 × 32 × 32 bytes."""

    def data(self, split: str) -> Labelled | None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return (images, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images.float() / 255), labels, reduction="sum"), len(labels)


class Texts(Workload):
    """Random token ids."""

    def data(self, split: str) -> Labelled | None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
        return (ids, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        ids, labels = batch
        return F.cross_entropy(model(ids), labels, reduction="sum"), len(labels)


class WideMlp(Images):
    def model(self) -> nn.Module:
        hidden = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 2048), nn.GELU(), *hidden, nn.Linear(2048, CLASSES))


def convolved(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(8, outside), nn.ReLU()]


class Vgg(Images):
    def model(self) -> nn.Module:
        sides = ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        body = [layer for sizes in sides for layer in convolved(*sizes)]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class Autoencoder(Images):
    def model(self) -> nn.Module:
        down = [*convolved(3, 48, 2), *convolved(48, 96, 2), *convolved(96, 192, 2)]
        up: list[nn.Module] = []
        for inside, outside in ((192, 96), (96, 48), (48, 24)):
            up += [nn.ConvTranspose2d(inside, outside, 4, 2, 1), nn.ReLU()]
        return nn.Sequential(*down, *up, nn.Conv2d(24, 3, 3, 1, 1))

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        images = batch[0].float() / 255
        return F.mse_loss(model(images), images, reduction="sum") / images[0].numel(), len(images)


class Patches(nn.Module):
    """A small vision transformer of the framework's own layers."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        each = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(each, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(x).mean(1))


class Vit(Images):
    def model(self) -> nn.Module:
        return Patches(256, 8, 6)


class Mixed(nn.Module):
    """Convolutions over words, of three widths, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.widths = nn.ModuleList(nn.Conv1d(128, 128, width, padding=width // 2) for width in (3, 5, 7))
        self.head = nn.Linear(3 * 128, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        return self.head(torch.cat([F.relu(width(x)).amax(2) for width in self.widths], 1))


class TextCnn(Texts):
    def model(self) -> nn.Module:
        return Mixed()


class Bag(Texts):
    def model(self) -> nn.Module:
        sizes = [layer for _ in range(2) for layer in (nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU())]
        return nn.Sequential(nn.EmbeddingBag(WORDS, 512), *sizes, nn.Linear(512, CLASSES))


NAMES = ("WideMlp", "Vgg", "Autoencoder", "Vit", "TextCnn", "Bag")
