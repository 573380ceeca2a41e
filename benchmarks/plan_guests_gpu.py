"""Is the plan right for modules and models of other people that nobody looked at while its formulas were written?

    python benchmarks/plan_guests_gpu.py [NAME ...] [--out plan_guests.json] [--steps 40] [--seconds 400]

Eight of them, each in a process of its own: step time and peak memory, planned for the catalogue's device and measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.config import build_spec
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir

GIB = float(1 << 30)
WORDS, CLASSES, VOCAB = 8_000, 20, 16_000


def whole(samples: int, batch: int) -> int:
    """Return so many samples that no step has less than a whole batch, as the plan has it."""
    return samples // batch * batch


class Texts(paceline.Workload):
    length, batch = 100, 256

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        draw = torch.Generator().manual_seed(0)
        count = whole(2048, self.batch)
        ids = torch.randint(0, WORDS, (count, self.length), generator=draw)
        return (ids, torch.randint(0, CLASSES, (count,), generator=draw)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum"), len(batch[1])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int, layers: int, both: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = kind(width, width, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear((1 + both) * width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids))[0].mean(1))


class TwoWays(Texts):
    """A bidirectional GRU."""

    def model(self) -> nn.Module:
        return Recurrent(nn.GRU, 384, 2, True)


class Tall(Texts):
    """A wide LSTM of three layers."""

    length, batch = 200, 96

    def model(self) -> nn.Module:
        return Recurrent(nn.LSTM, 1024, 3, False)


class Images(paceline.Workload):
    side, batch = 128, 128

    def data(self, split: str) -> tuple[Tensor, Tensor] | None:
        draw = torch.Generator().manual_seed(0)
        count = whole(1024, self.batch)
        images = torch.randint(0, 256, (count, 3, self.side, self.side), generator=draw, dtype=torch.uint8)
        return (images, torch.randint(0, CLASSES, (count,), generator=draw)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0].float() / 255).float(), batch[1], reduction="sum"), len(batch[1])


def convolve(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())


class Vgg(Images):
    def model(self) -> nn.Module:
        sides = ((3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512))
        layers = [convolve(a, b, 2 if i and not i % 2 else 1) for i, (a, b) in enumerate(sides)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Painting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolve(3, 48), convolve(48, 96, 2), convolve(96, 192, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(192, 96, 2, 2), nn.ConvTranspose2d(192, 48, 2, 2)])
        self.mix, self.head = convolve(96, 48), nn.Conv2d(48, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.down:
            x = layer(x)
            found.append(x)
        for up, skip in zip(self.up, found[-2::-1], strict=True):
            x = torch.cat([up(x), skip], 1)
        return self.head(self.mix(x)).mean((2, 3))


class Hourglass(Images):
    """An encoder and a decoder of convolutions, joined at each size."""

    side, batch = 96, 128

    def model(self) -> nn.Module:
        return Painting()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.places = nn.Conv2d(3, 768, 16, 16), nn.Parameter(torch.randn(1, 64, 768) * 0.02)
        each = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(each, 8, nn.LayerNorm(768), enable_nested_tensor=False)
        self.head = nn.Linear(768, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.cut(images).flatten(2).transpose(1, 2) + self.places).mean(1))


class Patches(Images):
    """A vision transformer of base width."""

    batch = 256

    def model(self) -> nn.Module:
        return Encoder()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 512)
        self.both = nn.Transformer(512, 8, 4, 4, 2048, 0.0, batch_first=True)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(self.both(x, x[:, :64]).mean(1))


class Translator(Texts):
    """`nn.Transformer`: an encoder and a decoder."""

    length, batch = 128, 128

    def model(self) -> nn.Module:
        return Pair()


QWEN = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
QWEN |= {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 2048}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
Sized = tuple[dict[str, Any], int, int, str]  # config, batch, length, train.compile
HUGGING: dict[str, Sized] = {
    "Qwen": (QWEN, 8, 1024, "on"),
    "Gpt2": (GPT2, 16, 512, "auto"),
}
OWN: dict[str, type[Texts | Images]] = {
    one.__name__: one for one in (TwoWays, Tall, Vgg, Hourglass, Patches, Translator)
}
COMPILED: tuple[str, ...] = ("Patches", "Translator")


def build(name: str, folder: Path, steps: int) -> Any:
    train = {"steps": steps, "precision": "bf16", "schedule": "constant", "warmup": 0.0, "log_every": 5}
    train |= {"checkpoint_every": 1 << 20, "evaluate_every": 1 << 20}
    if name in OWN:
        train |= {"global_batch": OWN[name].batch, "compile": "on" if name in COMPILED else "auto"}
        file = Path(str(sys.modules[OWN[name].__module__].__file__)).resolve()
        return build_spec({"name": name, "workload": f"{file}:{name}", "train": train})
    from tokenizers import Tokenizer, models, pre_tokenizers

    config, batch, length, compiling = HUGGING[name]
    words = {"[UNK]": 0, "<|endoftext|>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB, "tie_word_embeddings": True}))
    ids = np.random.default_rng(0).integers(2, VOCAB, (40, batch * length * steps // 30))
    for number, row in enumerate(ids):
        (folder / f"{number}.txt").write_text(" ".join(f"w{i}" for i in row))
    data = {"source": "text", "path": str(folder), "sequence": length, "cache": str(folder / "cache")}
    data |= {"test_fraction": 0.1, "tokenizer": str(folder / "tokenizer.json")}
    train |= {"global_batch": batch, "compile": compiling}
    model = {"config": str(folder / "config.json"), "task": "causal_lm"}
    return build_spec({"name": name, "workload": "transformers", "model": model, "data": data, "train": train})


def compare(name: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        spec = build(name, Path(scratch), steps)
        device = "1xH200" if not torch.cuda.is_available() or "H200" in torch.cuda.get_device_name() else "local"
        price = paceline.plan(spec, cluster=device, devices=[1]).rows[0].price
        found = {"planned_ms": price.step_s * 1e3, "planned_gib": price.memory.allocated_bytes / GIB}
        if not torch.cuda.is_available():
            return found
        torch.cuda.reset_peak_memory_stats()
        run = RunDir(paceline.train(spec, Path(scratch) / "runs", show=False).path)
        late = [step["step_s"] * 1e3 for step in read_steps(run.events_file(0))][steps // 2 :]
        found |= {"measured_ms": statistics.median(late), "measured_gib": torch.cuda.max_memory_allocated() / GIB}
        return {**found, "said": [event["execution"] for event in read_events(run.events_file(0), "start")][-1]}


def fork(work: Callable[[], dict[str, Any]], file: Path) -> dict[str, Any]:
    """Call in a process of its own, which has this one's imports but its own device memory."""
    if not (child := os.fork()):
        try:
            file.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def show(name: str, found: dict[str, Any]) -> str:
    text = f"{name:11s}"
    for unit in ("ms", "gib"):
        planned, measured = (found.get(f"{kind}_{unit}", float("nan")) for kind in ("planned", "measured"))
        text += f" {planned:9.2f} {measured:9.2f} {planned / measured - 1:+7.1%}"
    return f"{text}  {found.get('said', 'failed')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*OWN, *HUGGING])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no model after these")
    asked = parser.parse_args()
    began = time.monotonic()
    print(f"{'':11s} {'ms planned, measured':>27s} {'GiB planned, measured':>27s}", flush=True)
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.names:
            if time.monotonic() - began > asked.seconds:
                print(f"{name:11s} not begun", flush=True)
                continue
            kept[name] = fork(lambda name=name: compare(name, asked.steps), Path(folder) / name)  # type: ignore[misc]
            print(show(name, kept[name]), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
