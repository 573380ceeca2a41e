"""A text classifier: a transformer encoder with mean pooling, over texts packed without padding."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.corpora.labelled import LabelledCorpus, TokenSamples
from paceline.data.corpora.tokenised import CorpusWorkload
from paceline.errors import UserError, did_you_mean, join_names
from paceline.inference.export import write_standalone
from paceline.nn.attention import (
    Packed,
    average_texts,
    compute_packed_attention,
    drop_features,
    drop_tokens,
    pack_padded,
    pack_texts,
)
from paceline.nn.class_metrics import class_sums
from paceline.parallel.precision import to_at_least_fp32
from paceline.workload import LogFn
from paceline.workloads.classifier.sections import ClassifierModel, TextData
from paceline.workloads.classifier.standalone import ExportedClassifier, ExportedLayer


class EncoderLayer(ExportedLayer):
    """Pre-norm attention and feed-forward over packed texts; dropout is drawn from each text's key."""

    def __init__(self, shape: ClassifierModel, site: int) -> None:
        super().__init__(shape.width, shape.heads, shape.ffn)
        self.dropout, self.site = shape.dropout, site

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:  # type: ignore[override]
        tokens, width = x_TD.shape
        q, k, v = self.qkv(self.norm1(x_TD)).view(tokens, 3, self.heads, width // self.heads).unbind(1)
        x_TD = x_TD + self._dropout(
            self.out(compute_packed_attention(q, k, v, packed).reshape(tokens, width)), packed, 0
        )
        return x_TD + self._dropout(self.down(F.gelu(self.up(self.norm2(x_TD)))), packed, 1)

    def _dropout(self, x_TD: Tensor, packed: Packed, which: int) -> Tensor:
        if not (self.training and self.dropout):
            return x_TD
        return drop_features(x_TD, self.dropout, packed, self.site + which)


class Encoder(nn.Module):
    def __init__(self, shape: ClassifierModel, vocab: int, longest: int, classes: int, mask: int = 0) -> None:
        super().__init__()
        self.shape, self.mask, width = shape, mask, shape.width
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(EncoderLayer(shape, site=2 + 2 * i) for i in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        # what is added to the stream, and the head, start small: the first loss is that of a guess
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                shrink = 0.1 if name == "head" else 1.0
                if name.endswith((".out", ".down")):
                    shrink = 1 / math.sqrt(2 * len(self.layers))
                nn.init.normal_(module.weight, std=shrink / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, packed: Packed) -> Tensor:
        shape, tokens = self.shape, packed.tokens
        if self.training and shape.word_dropout:
            tokens = drop_tokens(packed, shape.word_dropout, site=0, replacement=self.mask)
        x_TD = self.tokens(tokens) + self.positions(packed.positions)
        if self.training and shape.dropout:
            x_TD = drop_features(x_TD, shape.dropout, packed, site=1)
        for layer in self.layers:
            x_TD = layer(x_TD, packed)
        return self.head(average_texts(self.norm(x_TD), packed))


class TextSamples(TokenSamples):
    half_only = True

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Packed:
        return pack_texts(self.tokens.gather(ids), self.tokens.lengths(ids), np.asarray(self.tokens.labels[ids]), keys)

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Packed]:
        ids, keys = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
        lengths, labels = [self.tokens.lengths(i) for i in ids], [np.asarray(self.tokens.labels[i]) for i in ids]
        return pack_padded(self.tokens.gather(np.concatenate(ids)), lengths, labels, keys, most, self.longest)


def compute_class_weights(asked: str | Mapping[str, float], corpus: LabelledCorpus) -> list[float]:
    """Return the weight of each class; `balanced`: equal totals over all training texts, and 1 per text on average."""
    classes = corpus.classes
    if isinstance(asked, str):
        counts = np.bincount(corpus.train.labels, minlength=len(classes))
        return [float(counts.sum() / (len(classes) * max(1, count))) for count in counts]
    for name in asked:
        if name not in classes:
            hint = did_you_mean(name, classes) or f"; the classes are {join_names(classes, 10)}"
            raise UserError(f"model.class_weights: no class {name!r}{hint}", code="unknown-name")
    return [asked.get(name, 1.0) for name in classes]


class Classifier(CorpusWorkload):
    Model = ClassifierModel
    Data = TextData
    Corpus = LabelledCorpus
    score = "accuracy"

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.shape, self.longest = cast(ClassifierModel, spec.model), cast(TextData, spec.data).max_length

    def prepare(self, log: LogFn) -> None:
        super().prepare(log)
        _ = self.class_weights  # rejects unknown classes before ranks start

    def model(self) -> Encoder:
        vocabulary = self.vocabulary
        return Encoder(self.shape, vocabulary.size, self.longest, len(vocabulary.classes), vocabulary.special)

    def data(self, split: str) -> TextSamples:
        return TextSamples(self.corpus.train if split == "train" else self.corpus.test, self.longest)

    def classes(self) -> Sequence[str]:
        return self.vocabulary.classes

    def loss(self, model: nn.Module, batch: Packed) -> tuple[Tensor, Tensor]:
        """Return (sum of losses, sum of weights) of a batch; without class weights, the number of labelled texts."""
        logits, labels = to_at_least_fp32(model(batch)), batch.labels
        smoothing = self.shape.label_smoothing
        if self.class_weights is None:
            return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing), (labels >= 0).sum()
        if self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)
        weights = self.class_weights.to(logits.dtype)
        total = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
        return total, (weights[labels.clamp(min=0)] * (labels >= 0)).sum()

    @cached_property
    def class_weights(self) -> Tensor | None:
        given = self.shape.class_weights
        return None if given == "none" else torch.tensor(compute_class_weights(given, self.corpus))

    def evaluate(self, model: nn.Module, batch: Packed) -> Mapping[str, Tensor | float]:
        logits = to_at_least_fp32(model(batch))
        return {
            "loss": F.cross_entropy(logits, batch.labels, reduction="none").double().sum(),
            "count": len(batch.labels),
            **class_sums(logits, batch.labels),
        }

    def encode(self, inputs: Sequence[Any]) -> tuple[Packed, Tensor]:
        """Return the texts from short to long, as in an evaluation, and their original order."""
        if wrong := [value for value in inputs if not isinstance(value, str)]:
            kinds = "; files of texts are .csv, .jsonl, .parquet and .txt" if isinstance(wrong[0], Path) else ""
            raise UserError(f"{str(wrong[0])[:60]!r} is not a text{kinds}")
        found = self.vocabulary.encode(list(inputs))
        order = np.argsort(found.lengths, kind="stable")
        begins = np.cumsum(found.lengths) - found.lengths
        ids = np.concatenate([found.ids[begins[i] : begins[i] + found.lengths[i]] for i in order])
        nothing = np.zeros(len(inputs), np.int64)
        return pack_texts(ids, found.lengths[order], nothing, nothing), torch.from_numpy(order)

    def predict(self, model: nn.Module, batch: tuple[Packed, Tensor]) -> Mapping[str, Tensor]:
        packed, order = batch
        logits = to_at_least_fp32(model(packed))[order.argsort()]
        return {"probabilities": logits.softmax(1), "logits": logits}

    def export(self, model: nn.Module, folder: Path) -> None:
        self.vocabulary.copy_tokenizer(folder)
        write_standalone(folder, model.state_dict(), self._build_config(), "paceline.workloads.classifier.standalone")

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        alone = ExportedClassifier(self._build_config())
        alone.load_state_dict(model.state_dict())
        length = min(5, self.longest)
        ids = torch.arange(2 * length).view(2, length) % self.vocabulary.size
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, length // 2 + 1 :] = False
        return alone.eval(), {"ids": ids, "mask": mask}

    def _build_config(self) -> dict[str, Any]:
        shape = self.shape.model_dump(include={"width", "heads", "layers", "ffn"})
        facts = {"vocab": self.vocabulary.size, "empty": self.vocabulary.special}
        return {**shape, **facts, "max_length": self.longest, "classes": list(self.classes())}
