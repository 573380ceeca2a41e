"""Modules as people write them, for `guests_gpu.py`: a network of convolutions, a transformer, sequences."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload

TINY = "--tiny" in sys.argv
"""Sizes for CPU cores, to try the program: of a run too, which reads this file by itself."""
CLASSES = 100
Labelled = tuple[Tensor, Tensor]


class Images(Workload):
    batch, side, count = 256, 224, 2048

    def data(self, split: str) -> Labelled | None:
        side, count = (32, 64) if TINY else (self.side, self.count)
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (count, 3, side, side), generator=draw, dtype=torch.uint8)
        return (images, torch.randint(0, CLASSES, (count,), generator=draw)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images.float() / 255).float(), labels, reduction="sum"), len(labels)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        sizes = ((inside, width, 1, 1), (width, width, 3, stride), (width, outside, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.short = nn.Sequential()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = F.relu(y) if index < 2 else y
        return F.relu(y + self.short(x))


class ResNet50(Images):
    side = 160

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        inside = 64
        for stage, repeats in enumerate((1, 1, 1, 1) if TINY else (3, 4, 6, 3)):
            width = 64 << stage
            blocks = []
            for index in range(repeats):
                blocks.append(Bottleneck(inside, width, 2 if stage and not index else 1))
                inside = 4 * width
            layers.append(nn.Sequential(*blocks))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


class Patches(nn.Module):
    """ViT-S/16."""

    def __init__(self, side: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + (side // 16) ** 2, width) * 0.02)
        each = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(each, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.layers(x)[:, 0])


class VisionTransformer(Images):
    def model(self) -> nn.Module:
        return Patches(32, 32, 2, 2) if TINY else Patches(224, 384, 6, 12)


class Gated(nn.Module):
    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.filter, self.gate = (nn.Conv1d(width, width, 3, padding=reach, dilation=reach) for _ in range(2))
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x)))


class GatedConvolutions(Images):
    batch, count = 128, 1024

    def data(self, split: str) -> Labelled | None:
        samples, count = (200, 64) if TINY else (4000, self.count)
        draw = torch.Generator().manual_seed(0)
        waves = torch.randn(count, 1, samples, generator=draw)
        return (waves, torch.randint(0, CLASSES, (count,), generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        width = 16 if TINY else 128
        layers = [Gated(width, 2**i) for i in range(8)]
        ends = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
        return nn.Sequential(nn.Conv1d(1, width, 1), *layers, *ends)

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        waves, labels = batch
        return F.cross_entropy(model(waves).float(), labels, reduction="sum"), len(labels)


class Recurrent(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids))[0])


class NextWord(Workload):
    batch = 128

    def data(self, split: str) -> tuple[Tensor] | None:
        words, length = (100, 16) if TINY else (10_000, 128)
        draw = torch.Generator().manual_seed(0)
        return (torch.randint(0, words, (4096, length + 1), generator=draw),) if split == "train" else None

    def model(self) -> nn.Module:
        return Recurrent(100, 32) if TINY else Recurrent(10_000, 512)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (ids,) = batch
        logits = model(ids[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()
