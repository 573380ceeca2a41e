"""Is the plan right for models on which no formula was set? Planned and measured, each in a process of its own.

    python benchmarks/plan_unseen_gpu.py [NAME ...] [--out plan_unseen.json] [--steps 40] [--seconds 400]

Eight were written before the formulas of `plan_guests_gpu.py` (Digits to Neox), eight more (Composer to Phi) before any
of these was measured and after all formulas, eleven (Handwriting to Small) before any of these was measured. None of
them is in another benchmark.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plan_guests_gpu
import torch
import torch.nn.functional as F
from plan_guests_gpu import CLASSES, WORDS, Images, Texts, whole
from torch import Tensor, nn


class Digits(Texts):
    """A GRU of three layers whose every place is classified, with no embedding: numbers in."""

    length, batch = 160, 160

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(640, self.length, 64, generator=draw)
        return (x, torch.randint(0, CLASSES, (640, self.length), generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        return Places(nn.GRU(64, 640, 3, batch_first=True), 640)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(batch[0]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


class Places(nn.Module):
    def __init__(self, layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class Hearing(nn.Module):
    """Convolutions over a spectrum, then an LSTM that reads both ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(80, width, 5, 2, 2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, 1, 2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.layers = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.front(x).transpose(1, 2))[0].amax(1))


class Speech(Texts):
    length, batch = 400, 64

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(512, 80, self.length, generator=draw)
        return (x, torch.randint(0, CLASSES, (512,), generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        return Hearing(320)


class Inverted(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inside
        self.body = nn.Sequential(
            nn.Conv2d(inside, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.same = inside == outside and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


class Mobile(Images):
    """Inverted residuals with depthwise convolutions."""

    side, batch = 160, 128

    def model(self) -> nn.Module:
        sides = ((32, 32, 1), (32, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 160, 2), (160, 160, 1))
        first = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, CLASSES)]
        return nn.Sequential(*first, *(Inverted(*each) for each in sides), *last)


class Residual(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(heads, width), nn.GroupNorm(heads, width)
        self.one, self.two = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.silu(self.second(self.one(F.silu(self.first(x))))))


class Denoiser(Images):
    """What predicts noise: group norms and SiLU at one size, one number per point."""

    side, batch = 64, 96

    def model(self) -> nn.Module:
        width = 160
        blocks = [Residual(width, 16) for _ in range(5)]
        return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), *blocks, nn.Conv2d(width, 3, 3, 1, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        clean = batch[0].float() / 255
        noise = torch.randn_like(clean)
        return F.mse_loss(model(clean + noise).float(), noise, reduction="sum") / noise[0].numel(), len(clean)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Modern(Images):
    """Depthwise 7 × 7 convolutions beside linear layers over channels."""

    side, batch = 192, 96

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
        for width, repeats in ((96, 2), (192, 2), (384, 4)):
            layers += [Block(width) for _ in range(repeats)]
            layers += [nn.Conv2d(width, 2 * width, 2, 2)] if width < 384 else []
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, CLASSES))


class Attending(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.joint(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.relu(self.up(self.after(x))))


class Seeing(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 12, 12)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + (side // 12) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(Attending(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Viewer(Images):
    """A vision transformer with blocks of its own."""

    side, batch = 192, 128

    def model(self) -> nn.Module:
        return Seeing(512, 8, 10, 192)


class Describing(nn.Module):
    """Convolutions see an image, a transformer decoder writes its words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU(), nn.Conv2d(64, width, 4, 4))
        self.words = nn.Embedding(WORDS, width)
        each = nn.TransformerDecoderLayer(width, 8, 4 * width, 0.1, F.relu, batch_first=True)
        self.write = nn.TransformerDecoder(each, 5)
        self.head = nn.Linear(width, WORDS)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        seen = self.see(images).flatten(2).transpose(1, 2)
        return self.head(self.write(self.words(ids), seen, mask, tgt_is_causal=True))


class Captions(Images):
    side, batch = 160, 96

    def data(self, split: str) -> Any:
        if (found := super().data(split)) is None:
            return None
        return found[0], torch.randint(0, WORDS, (len(found[0]), 41), generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        return Describing(384)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(batch[0].float() / 255, batch[1][:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch[1][:, 1:].flatten(), reduction="sum"), batch[1][:, 1:].numel()


class Composer(Texts):
    """The next of 2,000 events by a wide GRU."""

    length, batch, events = 256, 256, 2000

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.events, (1024, self.length + 1), generator=draw)
        return (ids,) if split == "train" else None

    def model(self) -> nn.Module:
        return Following(nn.GRU, self.events, 1024, 2)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(batch[0][:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[0][:, 1:].flatten(), reduction="sum"), batch[0][:, 1:].numel()


class Following(nn.Module):
    def __init__(self, kind: type[nn.Module], words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers, self.drop = kind(width, width, layers, batch_first=True), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(self.words(ids))[0]))


class Tagger(Texts):
    """A tag for each word by an LSTM that reads both ways."""

    length, batch = 160, 320

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, WORDS, (1280, self.length), generator=draw)
        return (ids, torch.randint(0, CLASSES, ids.shape, generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        words = nn.Embedding(WORDS, 512)
        layers = nn.LSTM(512, 512, 3, batch_first=True, bidirectional=True)
        return nn.Sequential(words, Places(layers, 1024))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(batch[0]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


class Wide(nn.Module):
    """Two convolutions with pre-activation, as wide residual networks have them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return self.short(x) + self.two(F.relu(self.second(self.one(y))))


class WideResidual(Images):
    """A wide residual network of 16 layers, eight times as wide as usual, on images of 32 × 32."""

    side, batch = 32, 768

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
        inside = 16
        for width, stride in ((128, 1), (256, 2), (512, 2)):
            layers += [Wide(inside, width, stride), Wide(width, width, 1)]
            inside = width
        return nn.Sequential(*layers, nn.BatchNorm2d(512), nn.ReLU(), *flatten(512))


def flatten(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


class Aggregated(nn.Module):
    """A bottleneck whose inner convolution has 32 groups."""

    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        sides = ((inside, width, 1, 1, 1), (width, width, 3, stride, 32), (width, outside, 1, 1, 1))
        for a, b, side, step, groups in sides:
            parts += [nn.Conv2d(a, b, side, step, side // 2, groups=groups, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*parts[:-1])
        self.short = nn.Sequential()
        if inside != outside or stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Grouped(Images):
    """Residual bottlenecks of grouped convolutions."""

    side, batch = 176, 160

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        inside = 64
        for stage, repeats in enumerate((3, 4, 6, 3)):
            for index in range(repeats):
                outside = 256 << stage
                layers.append(Aggregated(inside, 128 << stage, outside, 2 if stage and not index else 1))
                inside = outside
        return nn.Sequential(*layers, *flatten(inside))


class Library(Images):
    """A model of the library transformers that is trained as a module of one's own."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(pixel_values=batch[0].float() / 255).logits
        return F.cross_entropy(logits.float(), batch[1], reduction="sum"), len(batch[1])


class Shifted(Library):
    """Swin: attention in windows that shift."""

    side, batch = 224, 128

    def model(self) -> nn.Module:
        import transformers

        config = transformers.SwinConfig(num_labels=CLASSES, drop_path_rate=0.0)
        return transformers.SwinForImageClassification(config)


class Summary(Texts):
    """Bart, an encoder and a decoder, six layers each."""

    length, batch, target = 256, 96, 64

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        sides = [(whole(512, self.batch), length) for length in (self.length, self.target + 1)]
        ids = tuple(torch.randint(3, WORDS, side, generator=draw) for side in sides)
        return ids if split == "train" else None

    def model(self) -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6}
        sizes |= {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 512, "dropout": 0.0}
        sizes |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "use_cache": False}
        return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        texts, targets = batch
        logits = model(input_ids=texts, decoder_input_ids=targets[:, :-1]).logits.flatten(0, 1).float()
        return F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="sum"), targets[:, 1:].numel()


class Lines(nn.Module):
    """Convolutions over a line of writing, then a GRU over its columns, both ways."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for inside, outside, pool in ((3, 64, 2), (64, 128, 2), (128, 256, (2, 1)), (256, 320, (2, 1))):
            parts += [nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.LeakyReLU(0.1)]
            parts.append(nn.MaxPool2d(pool))
        self.see, self.read = nn.Sequential(*parts), nn.GRU(640, 320, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(640, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.see(x).permute(0, 3, 1, 2).flatten(2))[0])


class Handwriting(Images):
    batch, wide = 256, 320

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (512, 3, 32, self.wide), generator=draw, dtype=torch.uint8)
        found = images, torch.randint(0, CLASSES, (512, self.wide // 4), generator=draw)
        return found if split == "train" else None

    def model(self) -> nn.Module:
        return Lines()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits = model(batch[0].float() / 255).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


class Foreseeing(nn.Module):
    def __init__(self, numbers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(numbers, width, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, numbers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)[0]))


class Forecast(Texts):
    """The next of 48 numbers, by an LSTM and a norm."""

    length, batch, numbers = 144, 192, 48

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        return (torch.randn(768, self.length + 1, self.numbers, generator=draw),) if split == "train" else None

    def model(self) -> nn.Module:
        return Foreseeing(self.numbers, 896)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        made, wanted = model(batch[0][:, :-1]).float(), batch[0][:, 1:]
        return F.mse_loss(made, wanted, reduction="sum") / self.numbers, wanted[..., 0].numel()


class Plain(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        sides = ((inside, outside, stride), (outside, outside, 1))
        parts: list[nn.Module] = []
        for a, b, step in sides:
            parts += [nn.Conv2d(a, b, 3, step, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body, self.short = nn.Sequential(*parts[:-1]), nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Basic(Images):
    """A residual network of 18 layers."""

    side, batch = 160, 192

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        for a, b in ((64, 64), (64, 128), (128, 256), (256, 512)):
            layers += [Plain(a, b, 1 if a == b else 2), Plain(b, b, 1)]
        return nn.Sequential(*layers, *flatten(512))


class Painted(nn.Module):
    """Four sizes down and up again, by transposed convolutions, joined at each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sides = [width << level for level in range(4)]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([3, *sides[:-1]], sides, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in sides[-2::-1])
        self.join, self.head = nn.ModuleList(twice(2 * a, a) for a in sides[-2::-1]), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


def twice(inside: int, outside: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a in (inside, outside):
        parts += [nn.Conv2d(a, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*parts)


class Segments(Images):
    side, batch = 144, 64

    def model(self) -> nn.Module:
        return Painted(64)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        wanted = batch[0][:, 0].long() * CLASSES // 256
        logits = model(batch[0].float() / 255).float()
        return F.cross_entropy(logits, wanted, reduction="sum") / wanted[0].numel(), len(wanted)


class Translation(Summary):
    """Marian, an encoder and a decoder, five layers each."""

    length, batch, target = 128, 128, 96

    def model(self) -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 640, "encoder_layers": 5, "decoder_layers": 5}
        sizes |= {"encoder_ffn_dim": 2560, "decoder_ffn_dim": 2560, "max_position_embeddings": 256, "dropout": 0.0}
        sizes |= {"encoder_attention_heads": 10, "decoder_attention_heads": 10, "use_cache": False}
        sizes |= {"pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
        return transformers.MarianMTModel(transformers.MarianConfig(**sizes))


class Distilled(Library):
    """DeiT, a vision transformer with two tokens before the patches."""

    side, batch = 224, 128

    def model(self) -> nn.Module:
        import transformers

        sizes = {"hidden_size": 448, "num_hidden_layers": 10, "num_attention_heads": 7, "intermediate_size": 1792}
        return transformers.DeiTForImageClassification(transformers.DeiTConfig(**sizes, num_labels=CLASSES))


def convolve(inside: int, outside: int, kernel: int | tuple[int, int] = 3, stride: int = 1) -> nn.Sequential:
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = (sides[0] // 2, sides[1] // 2)
    layer = nn.Conv2d(inside, outside, kernel, stride, padding, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside), nn.ReLU())


class Signed(nn.Module):
    """Convolutions over a sign, then an LSTM over its columns, both ways."""

    def __init__(self) -> None:
        super().__init__()
        last = (convolve(128, 256), convolve(256, 256), nn.MaxPool2d((2, 1)))
        self.see = nn.Sequential(convolve(3, 64), nn.MaxPool2d(2), convolve(64, 128), nn.MaxPool2d(2), *last)
        self.read = nn.LSTM(1024, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.see(x).permute(0, 3, 1, 2).flatten(2))[0]).mean(1)


class Signs(Images):
    batch = 512

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (1024, 3, 32, 128), generator=draw, dtype=torch.uint8)
        return (images, torch.randint(0, CLASSES, (1024,), generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        return Signed()


class Streaming(nn.Module):
    def __init__(self, numbers: int, width: int) -> None:
        super().__init__()
        self.first = nn.GRU(numbers, width, 2, batch_first=True)
        self.second = nn.LSTM(width, width, 1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x)[0])[0][:, -1]))


class Streams(Texts):
    """A GRU of two layers, then an LSTM, over numbers."""

    length, batch = 240, 256

    def data(self, split: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(1024, self.length, 96, generator=draw)
        return (x, torch.randint(0, CLASSES, (1024,), generator=draw)) if split == "train" else None

    def model(self) -> nn.Module:
        return Streaming(96, 512)


class Branches(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        wide = nn.Sequential(convolve(inside, width, 1), convolve(width, width, 5))
        long = nn.Sequential(convolve(inside, width, 1), convolve(width, width, (1, 7)), convolve(width, width, (7, 1)))
        pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), convolve(inside, width, 1))
        self.each = nn.ModuleList([convolve(inside, width, 1), wide, long, pooled])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.each], 1)


class Inception(Images):
    """Branches of 1 × 1, 5 × 5, 1 × 7 and 7 × 1 convolutions and of pools, side by side."""

    side, batch = 128, 96

    def model(self) -> nn.Module:
        first = convolve(3, 32, 3, 2), convolve(32, 64), nn.MaxPool2d(3, 2), Branches(64, 64), Branches(256, 64)
        second = nn.MaxPool2d(3, 2), Branches(256, 128), Branches(512, 128), nn.Dropout(0.2)
        return nn.Sequential(*first, *second, *flatten(512))


class Autoencoder(Images):
    """Three convolutions down to 256 numbers, and three transposed ones up again."""

    side, batch = 64, 256

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)]
        for a, b in ((32, 64), (64, 128)):
            layers += [nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        layers += [nn.Flatten(), nn.Linear(8192, 256), nn.Linear(256, 8192), nn.Unflatten(1, (128, 8, 8))]
        for a, b in ((128, 64), (64, 32)):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        clean = batch[0].float() / 255
        return F.mse_loss(model(clean).float(), clean, reduction="sum") / clean[0].numel(), len(clean)


class Small(Library):
    """ViT of the library, eight layers."""

    side, batch = 192, 128

    def model(self) -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
        sizes |= {"intermediate_size": 1536, "image_size": 192, "patch_size": 16, "num_labels": CLASSES}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


NEOX = {"model_type": "gpt_neox", "hidden_size": 640, "num_hidden_layers": 10, "num_attention_heads": 10}
NEOX |= {"intermediate_size": 2560, "max_position_embeddings": 1024, "rotary_pct": 0.25}

MISTRAL = {"model_type": "mistral", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 14}
MISTRAL |= {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048, "head_dim": 128}
PHI = {"model_type": "phi", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
PHI |= {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 1024}


if __name__ == "__main__":
    names: tuple[type[Texts | Images], ...] = (Digits, Speech, Mobile, Denoiser, Modern, Captions, Viewer)
    names = (Handwriting, Forecast, Basic, Segments, Translation, Distilled, *names)
    names = (Signs, Streams, Inception, Autoencoder, Small, *names)
    names = (Composer, Tagger, WideResidual, Grouped, Shifted, Summary, *names)
    plan_guests_gpu.OWN = {one.__name__: one for one in names}
    plan_guests_gpu.HUGGING = {
        "Mistral": (MISTRAL, 8, 1024, "on"),
        "Phi": (PHI, 16, 512, "auto"),
        "Neox": (NEOX, 24, 384, "auto"),
    }
    plan_guests_gpu.COMPILED = ("Viewer", "Summary")
    plan_guests_gpu.main()
