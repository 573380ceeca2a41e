"""A classifier of texts: its samples are packed end to end, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.corpora.tokens import LabelledCorpus, Tokens
from paceline.nn.packed import Packed, pack, pack_padded
from paceline.workload import Workload
from paceline.workloads.classifier.encoder import Encoder
from paceline.workloads.classifier.sections import ClassifierModel, TextData


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class TextSamples:
    """One split of a corpus as samples."""

    def __init__(self, tokens: Tokens, longest: int) -> None:
        self.tokens, self.longest = tokens, longest

    def __len__(self) -> int:
        return len(self.tokens)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return self.tokens.lengths(ids)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Packed:
        return pack(self.tokens.gather(ids), self.tokens.lengths(ids), np.asarray(self.tokens.labels[ids]), keys)

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Packed]:
        ids, keys = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
        lengths, labels = [self.tokens.lengths(i) for i in ids], [np.asarray(self.tokens.labels[i]) for i in ids]
        return pack_padded(self.tokens.gather(np.concatenate(ids)), lengths, labels, keys, most, self.longest)


class Classifier(Workload):
    Model = ClassifierModel
    Data = TextData
    score = "accuracy"
    unit = "tokens"

    def prepare(self, say: Callable[[str], None]) -> None:
        self.corpus = LabelledCorpus.prepare(self.spec.data, say)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @cached_property
    def corpus(self) -> LabelledCorpus:
        return LabelledCorpus.prepare(self.spec.data)

    def model(self) -> Encoder:
        shape, data = cast(ClassifierModel, self.spec.model), cast(TextData, self.spec.data)
        return Encoder(shape, self.corpus.vocab, data.max_length, len(self.corpus.classes))

    def data(self, split: str) -> TextSamples:
        tokens = self.corpus.train if split == "train" else self.corpus.test
        return TextSamples(tokens, cast(TextData, self.spec.data).max_length)

    def loss(self, model: nn.Module, batch: Packed) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(at_least_fp32(model(batch)), batch.labels, reduction="sum")
        return total, (batch.labels >= 0).sum()

    def evaluate(self, model: nn.Module, batch: Packed) -> Mapping[str, Tensor | float]:
        logits = at_least_fp32(model(batch))
        return {
            "loss": F.cross_entropy(logits, batch.labels, reduction="none").double().sum(),
            "accuracy": (logits.argmax(1) == batch.labels).sum(),
            "count": len(batch.labels),
        }
