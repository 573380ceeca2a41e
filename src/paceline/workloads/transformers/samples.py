"""Samples as batches of any task: the model's inputs by name, and a label for each prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.data.corpora.documents import Windows
from paceline.data.corpora.labelled import Tokens, TokenSamples
from paceline.data.order import derive_key, draw_fractions
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.workloads.transformers.pairs import Pairs

LENGTH_STEP = 32
REPLACED, KEPT = 0.8, 0.1  # of the tokens that are to be predicted: by the mask, and not at all; the rest by any token


class Batch(NamedTuple):
    inputs: dict[str, Tensor]
    labels: Tensor  # NOT_COUNTED where nothing is predicted


def pad_rows(rows: Sequence[Any], fill: int, shape: tuple[int, int] = (0, 0)) -> Tensor:
    """Pad to the longest row, and at least to `shape`."""
    out = np.full((max(len(rows), shape[0]), max([1, shape[1], *map(len, rows)])), fill, np.int64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return torch.from_numpy(out)


def pad_texts(texts: Sequence[Any], pad: int, shape: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    """Return tokens and where they are. An added row shows one token, because fully masked attention gives NaN."""
    mask = pad_rows([np.ones(len(text)) for text in texts], 0, shape)
    mask[len(texts) :, 0] = 1
    return {"input_ids": pad_rows(texts, pad, shape), "attention_mask": mask}


class CausalWindows(Windows):
    """Windows of a stream of tokens, in which each predicts the next."""

    def padded(self, ids: np.ndarray, keys: np.ndarray, rows: int) -> Batch:  # type: ignore[override]
        tokens, targets = super().padded(ids, keys, rows)
        return Batch({"input_ids": tokens}, targets)


@dataclass(frozen=True)
class MaskRule:
    """Which tokens of a sample are masked; `special` separates documents, and is not."""

    fraction: float
    mask: int
    special: int
    vocab: int


class MaskedWindows(Windows):
    """Windows in which some tokens are masked, drawn from the key of each sample: the same on any layout."""

    def __init__(self, ids: Any, sequence: int, rule: MaskRule) -> None:
        super().__init__(ids, sequence)
        self.rule = rule

    def padded(self, ids: np.ndarray, keys: np.ndarray, rows: int) -> Batch:  # type: ignore[override]
        rule, (tokens_RS, following_RS) = self.rule, super().padded(ids, keys, rows)
        labels_RS, mask_RS = torch.full_like(tokens_RS, NOT_COUNTED), (following_RS != NOT_COUNTED).long()
        for row, (number, key) in enumerate(zip(ids.tolist(), keys.tolist(), strict=True)):
            chosen, how, other = draw_fractions(derive_key(key, number), 0, 3 * self.sequence).reshape(3, -1)
            tokens = tokens_RS[row].numpy()
            chosen[(mask_RS[row].numpy() == 0) | (tokens == rule.special)] = 1.0
            hit = (chosen < rule.fraction) | (chosen == chosen.min())
            labels_RS[row, hit] = tokens_RS[row, hit]
            tokens[hit & (how < REPLACED)] = rule.mask
            drawn = hit & (how >= REPLACED + KEPT)
            tokens[drawn] = (other[drawn] * rule.vocab).astype(np.int64)
        mask_RS[:, 0] = 1
        return Batch({"input_ids": tokens_RS, "attention_mask": mask_RS}, labels_RS)


class LabelledTexts(TokenSamples):
    """Texts with a class each."""

    def __init__(self, tokens: Tokens, pad: int, longest: int) -> None:
        super().__init__(tokens, longest)
        self.pad = pad

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Batch:
        return self._padded(ids)

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Batch]:
        lengths = [int(self.tokens.lengths(ids).max(initial=1)) for ids, _ in cuts]
        lengths = [min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.longest) for length in lengths]
        return [self._padded(ids, (most, length)) for (ids, _), length in zip(cuts, lengths, strict=True)]

    def _padded(self, ids: np.ndarray, shape: tuple[int, int] = (0, 0)) -> Batch:
        texts = np.split(self.tokens.gather(ids), np.cumsum(self.tokens.lengths(ids))[:-1]) if len(ids) else []
        labels = np.full(max(len(ids), shape[0]), NOT_COUNTED, np.int64)
        labels[: len(ids)] = self.tokens.labels[ids]
        return Batch(pad_texts(texts, self.pad, shape), torch.from_numpy(labels))


class PairedTexts:
    """Texts with a tag for each token or, for a `decoder` of these (start, end) tokens, what it is to write."""

    def __init__(self, pairs: Pairs, pad: int, decoder: tuple[int, int | None] | None = None) -> None:
        self.pairs, self.pad, self.decoder = pairs, pad, decoder

    def __len__(self) -> int:
        return len(self.pairs)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        spans = [self.pairs.offsets] + ([self.pairs.target_offsets] if self.decoder else [])
        return np.sum([offsets[ids + 1] - offsets[ids] for offsets in spans], axis=0)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Batch:
        targets, inputs = [self.pairs.target(n) for n in ids], pad_texts([self.pairs.text(n) for n in ids], self.pad)
        if self.decoder is None:
            return Batch(inputs, pad_rows(targets, NOT_COUNTED))
        start, end = self.decoder
        if end is not None:
            targets = [target if target[-1] == end else np.append(target, end) for target in targets]
        labels = pad_rows(targets, NOT_COUNTED)
        return Batch({**inputs, "decoder_input_ids": shift_right(labels, start, self.pad)}, labels)


def shift_right(labels_BT: Tensor, start: int, pad: int) -> Tensor:
    """Return what a decoder reads to predict these labels: a start token, and all of them but the last."""
    shifted = torch.cat([torch.full_like(labels_BT[:, :1], start), labels_BT[:, :-1]], 1)
    return torch.where(shifted == NOT_COUNTED, pad, shifted)
