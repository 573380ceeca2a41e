"""A model of texts for few of them: words and pairs of words, hashed, each with a weight for every class."""

from __future__ import annotations

import re
import zlib
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload, class_sums
from paceline.config import Section, field
from paceline.data import read_table

PLACES, MOST = 1 << 15, 512


def places(text: str) -> list[int]:
    """Where the words and pairs of a text are, 0 where there are no more."""
    words = re.findall(r"[a-z']+|!", text.lower())
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    found = sorted({1 + zlib.crc32(part.encode()) % (PLACES - 1) for part in (*words, *pairs)})
    return (found + [0] * MOST)[:MOST]


class Weights(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(PLACES, classes, padding_idx=0)
        self.shift = nn.Parameter(torch.zeros(classes))
        nn.init.zeros_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum(1) / (ids > 0).sum(1, keepdim=True).clamp(min=1).sqrt() + self.shift


class Words(Workload):
    class Data(Section):
        path: str = field("train.csv", "path", "table to learn from")
        test_path: str = field("test.csv", "path", "table to test on")
        text: str = field("text", "column", "that is read")
        label: str = field("label", "column", "that is predicted")
        names: tuple[str, ...] = field((), "classes", "that the label has")

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        data = self.spec.data
        table = read_table(data.path if split == "train" else data.test_path)
        ids = torch.tensor([places(text) for text in table.texts(data.text)])
        return ids, torch.as_tensor(table.codes({data.label: self.classes()})[:, 0])

    def model(self) -> nn.Module:
        return Weights(len(self.classes()))

    def loss(self, model, batch):  # type: ignore[no-untyped-def]
        ids, labels = batch
        return F.cross_entropy(model(ids), labels, reduction="sum"), len(labels)

    def evaluate(self, model, batch):  # type: ignore[no-untyped-def]
        ids, labels = batch
        logits = model(ids)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss, "count": len(labels), **class_sums(logits, labels)}

    def classes(self) -> tuple[str, ...]:
        return self.spec.data.names

    def encode(self, inputs):  # type: ignore[no-untyped-def]
        return torch.tensor([places(text) for text in inputs])

    def predict(self, model, batch):  # type: ignore[no-untyped-def]
        return {"probabilities": model(batch).softmax(1)}
