"""Modules as people write them, which the planner tries out: for `plan_gpu.py --set own` and `own-seen`.

The prices of eager kernels were set with the first twelve in view; the last six were first planned and run after that.
"""

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


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.around = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.around(x))


class ResNet(Images):
    def model(self) -> nn.Module:
        sides = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        body = [Residual(*sizes) for sizes in sides]
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
        )


class Shuffled(Images):
    """Depthwise and pointwise convolutions in turn."""

    def model(self) -> nn.Module:
        body: list[nn.Module] = [*convolved(3, 64)]
        for inside, outside, stride in ((64, 128, 1), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)):
            body += [nn.Conv2d(inside, inside, 3, stride, 1, groups=inside), nn.BatchNorm2d(inside), nn.ReLU6()]
            body += [nn.Conv2d(inside, outside, 1), nn.BatchNorm2d(outside), nn.ReLU6()]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Hourglass(nn.Module):
    """Down and up again, with what was seen on the way down joined in."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(*convolved(a, b)) for a, b in ((3, 32), (32, 64), (64, 128)))
        self.up = nn.ModuleList(nn.Sequential(*convolved(a, b)) for a, b in ((192, 64), (96, 32)))
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down[0](x)
        middle = self.down[1](F.max_pool2d(high, 2))
        low = self.down[2](F.max_pool2d(middle, 2))
        y = self.up[0](torch.cat([F.interpolate(low, scale_factor=2.0), middle], 1))
        return self.out(self.up[1](torch.cat([F.interpolate(y, scale_factor=2.0), high], 1)))


class Painter(Images):
    def model(self) -> nn.Module:
        return Hourglass()

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        images = batch[0].float() / 255
        return F.l1_loss(model(images), images, reduction="sum") / images[0].numel(), len(images)


class HandWritten(nn.Module):
    """Attention spelled out, with scores that are stored and dropped."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        scores = F.dropout(torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1), 0.1, self.training)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(-2))
        return x + self.ffn(self.norms[1](x))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 320), nn.Parameter(torch.zeros(LENGTH, 320))
        self.layers = nn.Sequential(*(HandWritten(320, 5) for _ in range(4)))
        self.head = nn.Linear(320, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids) + self.places).amax(1))


class TextReader(Texts):
    def model(self) -> nn.Module:
        return Reader()


class Gated(nn.Module):
    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.filter, self.gate = (nn.Conv1d(width, width, 3, padding=reach, dilation=reach) for _ in range(2))
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x)))


class Waves(Texts):
    """Dilated convolutions over the words, gated."""

    def model(self) -> nn.Module:
        class Turned(nn.Embedding):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids).transpose(1, 2)

        layers = [Gated(192, 2**i) for i in range(5)]
        return nn.Sequential(
            Turned(WORDS, 192), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(192, CLASSES)
        )


class Table(nn.Module):
    """Columns of categories, each with a table of its own, and a wide net on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(WORDS, 32) for _ in range(16))
        body = [
            layer
            for _ in range(3)
            for layer in (nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.SiLU(), nn.Dropout(0.2))
        ]
        self.net = nn.Sequential(nn.Linear(512, 1024), *body, nn.Linear(1024, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(torch.cat([table(ids[:, i]) for i, table in enumerate(self.columns)], 1))


class Categories(Texts):
    def model(self) -> nn.Module:
        return Table()


class Mixing(nn.Module):
    """Over the patches, then over the features."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class Mixer(Images):
    def model(self) -> nn.Module:
        cut = [nn.Unflatten(2, (8, 4)), nn.Flatten(3), nn.Unflatten(3, (4, 8, 4)), nn.Flatten(1)]
        ends = [nn.Unflatten(1, (64, 48)), nn.Linear(48, 384)], [nn.Flatten(), nn.Linear(64 * 384, CLASSES)]
        return nn.Sequential(*cut, *ends[0], *(Mixing(64, 384) for _ in range(4)), *ends[1])


class Joined(nn.Module):
    def __init__(self, inside: int, more: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, more, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Dense(Images):
    """Every layer sees all before it."""

    def model(self) -> nn.Module:
        layers = [Joined(32 + 32 * i, 32) for i in range(6)]
        ends = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(224 * 64, CLASSES)]
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *layers, *ends)


class Stem(Images):
    """Large kernels, pools and batch norms."""

    def model(self) -> nn.Module:
        first = [nn.Conv2d(3, 64, 7, 1, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
        then = [nn.Conv2d(64, 192, 5, 1, 2), nn.BatchNorm2d(192), nn.ReLU(), nn.MaxPool2d(2)]
        ends = [nn.Flatten(), nn.Linear(192 * 64, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, CLASSES)]
        return nn.Sequential(*first, *then, *ends)


class NextWord(nn.Module):
    """A small language model of the framework's own layers, with a loss over all words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 256)
        each = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, "relu", batch_first=True)
        self.layers = nn.TransformerEncoder(each, 3, enable_nested_tensor=False)
        self.head = nn.Linear(256, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.words(ids), mask=mask, is_causal=True))


class Writer(Texts):
    def model(self) -> nn.Module:
        return NextWord()

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        ids = batch[0]
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / LENGTH, len(ids)


class TwoTowers(Texts):
    """One half of the words against the other."""

    def model(self) -> nn.Module:
        class Towers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.EmbeddingBag(WORDS, 256, mode="mean")
                sides = [(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(2)]
                self.towers = nn.ModuleList(nn.Sequential(*layers) for layers in sides)

            def forward(self, ids: Tensor) -> Tensor:
                one, other = (tower(self.words(half)) for tower, half in zip(self.towers, ids.chunk(2, 1), strict=True))
                return F.normalize(one.float(), dim=-1) @ F.normalize(other.float(), dim=-1).T

        return Towers()

    def loss(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
        scores = model(batch[0]) * 20
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="sum"), len(scores)


class Wide(Texts):
    """Convolutions over words, normed and pooled step by step."""

    def model(self) -> nn.Module:
        class Rows(nn.Embedding):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids).transpose(1, 2)

        body: list[nn.Module] = []
        for inside, outside in ((256, 256), (256, 512), (512, 512)):
            body += [nn.Conv1d(inside, outside, 5, padding=2), nn.BatchNorm1d(outside), nn.ELU(), nn.MaxPool1d(2)]
        return nn.Sequential(Rows(WORDS, 256), *body, nn.Flatten(), nn.Linear(512 * 8, CLASSES))


SEEN = ("WideMlp", "Vgg", "Autoencoder", "Vit", "TextCnn", "Bag")
SEEN += ("ResNet", "Shuffled", "Painter", "TextReader", "Waves", "Categories")
UNSEEN = ("Mixer", "Dense", "Stem", "Writer", "TwoTowers", "Wide")
