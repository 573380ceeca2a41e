"""Batch norm and dropout of torch, Keras and transformers on 1, 2 and 4 ranks, with and without accumulation.

    .venv/bin/python benchmarks/batch_layers.py [resnet|bert|keras|groupnorm ...] [--width 64] [--steps 4]

Prints the table of docs/check.md: for each model the largest difference of any layout to one rank.
"""

import argparse
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"}

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload, check
from paceline.config import Section, build_spec, field

SAMPLES, CLASSES = 512, 10


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: Any, p: float) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.drop = nn.Dropout2d(p)
        self.short = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.short(x) + self.norm2(self.conv2(self.drop(y))))


class ResNet18(nn.Module):
    """The ResNet of 18 layers for small images, with dropout; 11.2 M parameters at a width of 64."""

    def __init__(
        self, width: int = 64, norm: type[nn.Module] = nn.BatchNorm2d, p: float = 0.1, colours: int = 1
    ) -> None:
        super().__init__()
        sizes = [width * n for n in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), norm(width), nn.ReLU())
        self.blocks = nn.ModuleList(ResidualBlock(a, b, norm, p) for a, b in pairwise(sizes))
        self.drop, self.head = nn.Dropout(p), nn.Linear(sizes[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean((2, 3))))


class Residual(Workload):
    class Model(Section):
        width: int = field(64, "channels", "of the first layer")

    def model(self) -> nn.Module:
        return ResNet18(self.spec.model.width)

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        drawn, samples = torch.Generator().manual_seed(len(split)), SAMPLES if split == "train" else 64
        labels = torch.randint(0, CLASSES, (samples,), generator=drawn)
        return torch.randn(samples, 1, 28, 28, generator=drawn) + labels[:, None, None, None] / 5, labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels)


class Grouped(Residual):
    def model(self) -> nn.Module:
        return ResNet18(self.spec.model.width, group_norm)


class BERT(Residual):
    """BERT as transformers has it, its dropout of 0.1 in embeddings, attention and layers."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        side = self.spec.model.width
        sizes = {"hidden_size": side, "intermediate_size": 4 * side, "num_hidden_layers": 4, "num_attention_heads": 4}
        return BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=CLASSES, **sizes))

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        drawn, samples = torch.Generator().manual_seed(len(split)), SAMPLES if split == "train" else 64
        return tuple(torch.randint(0, n, s, generator=drawn) for n, s in ((1000, (samples, 32)), (10, (samples,))))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="sum"), len(batch[1])


KERAS = """
import keras, numpy as np
from keras import layers

def build(width):
    return keras.Sequential([
        layers.Input((28, 28, 1)), layers.Conv2D(width, 3, 2), layers.BatchNormalization(), layers.ReLU(),
        layers.SpatialDropout2D(0.1), layers.Conv2D(width, 3, 2), layers.BatchNormalization(), layers.ReLU(),
        layers.Flatten(), layers.Dropout(0.2), layers.Dense(10)])

def data(split):
    drawn = np.random.default_rng(len(split))
    labels = drawn.integers(0, 10, 512 if split == "train" else 64)
    return drawn.normal(size=(len(labels), 28, 28, 1)).astype("float32") + labels[:, None, None, None] / 5, labels
"""


def describe_run(name: str, width: int, folder: Path) -> dict:
    train = {"steps": 4, "global_batch": 64, "lr": 1e-2, "optimizer": "sgd", "warmup": 0, "schedule": "constant"}
    run = {"name": name, "train": train, "parallel": {"threads": 1, "timeout_s": 600, "device": "cpu"}}
    if name != "keras":
        kind = {"resnet": "Residual", "bert": "BERT", "groupnorm": "Grouped"}[name]
        return {**run, "workload": f"{__file__}:{kind}", "model": {"width": width}}
    (folder / "net.py").write_text(KERAS)
    model = {"build": f"{folder}/net.py:build", "arguments": {"width": width}}
    model |= {"loss": "sparse_categorical_crossentropy", "from_logits": True}
    return {**run, "workload": "keras", "model": model, "data": {"source": f"{folder}/net.py:data"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["resnet", "bert", "keras", "groupnorm"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    print("| model | ranks | passes | loss | gradient norm | weights | verdict |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            parity = check(build_spec(describe_run(name, given.width, Path(folder))), [1, 2, 4], [1, 2], given.steps)
            for row in parity.rows[1:]:
                verdict = "same" if row.agrees(parity.tolerance) else parity.verdict.strip("; ") or "differs"
                found = f"{row.loss:.1e} | {row.grad_norm:.1e} | {row.weights:.1e} | {verdict}"
                print(f"| {name} | {row.ranks} | {row.accumulate} | {found} |", flush=True)


if __name__ == "__main__":
    main()
