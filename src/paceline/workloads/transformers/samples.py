"""Samples as batches of any task: the model's inputs by name, and a label for each prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.data.corpora.documents import Windows
from paceline.data.corpora.labelled import Tokens, TokenSamples
from paceline.data.order import derive_key, draw_fractions
from paceline.nn.attention import Packed, pack_padded
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.workloads.transformers.chat import pack_lengths
from paceline.workloads.transformers.pairs import Pairs
from paceline.workloads.transformers.sections import LENGTH_STEP

REPLACED, KEPT = 0.8, 0.1  # of the tokens to predict: by the mask, not at all; else any token


class Batch(NamedTuple):
    inputs: dict[str, Any]  # tensors, and for texts in one row the length of the longest
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
        self.packed = False  # batches of fixed shape are one row of texts
        self.first_place = 0  # of a text in a row

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Batch:
        return self._padded(ids)

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Batch]:
        if self.packed:
            return self.pack(cuts, most)
        lengths = [int(self.tokens.lengths(ids).max(initial=1)) for ids, _ in cuts]
        lengths = [min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.longest) for length in lengths]
        return [self._padded(ids, (most, length)) for (ids, _), length in zip(cuts, lengths, strict=True)]

    def pack(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Batch]:
        """Return texts end to end, filled up with texts that do not count."""
        ids, t = np.concatenate([ids for ids, _ in cuts]), self.tokens
        lengths, labels = [t.lengths(ids) for ids, _ in cuts], [t.labels[ids] for ids, _ in cuts]
        rows = pack_padded(t.gather(ids), lengths, labels, [keys for _, keys in cuts], most, self.longest)
        return [Batch(_build_packed_inputs(row, self.first_place), row.labels) for row in rows]

    def _padded(self, ids: np.ndarray, shape: tuple[int, int] = (0, 0)) -> Batch:
        texts = np.split(self.tokens.gather(ids), np.cumsum(self.tokens.lengths(ids))[:-1]) if len(ids) else []
        labels = np.full(max(len(ids), shape[0]), NOT_COUNTED, np.int64)
        labels[: len(ids)] = self.tokens.labels[ids]
        return Batch(pad_texts(texts, self.pad, shape), torch.from_numpy(labels))


def _build_packed_inputs(row: Packed, position_offset: int) -> dict[str, Any]:
    """Return the arguments of the model: tokens, positions, and the bounds of texts for attention of varying length."""
    inputs = {"input_ids": row.tokens.long()[None], "position_ids": row.positions.long()[None] + position_offset}
    bounds = {"cu_seq_lens_q": row.bounds, "cu_seq_lens_k": row.bounds}
    return {**inputs, **bounds, "max_length_q": row.longest, "max_length_k": row.longest}


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
        inputs = pad_texts([self.pairs.text_ids(n) for n in ids], self.pad)
        targets = [self.pairs.target_ids(n) for n in ids]
        if self.decoder is None:
            return Batch(inputs, pad_rows(targets, NOT_COUNTED))
        start, end = self.decoder
        if end is not None:
            targets = [target if target[-1] == end else np.append(target, end) for target in targets]
        labels = pad_rows(targets, NOT_COUNTED)
        read = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)  # a start token, all but the last
        return Batch({**inputs, "decoder_input_ids": torch.where(read == NOT_COUNTED, self.pad, read)}, labels)


class Conversations:
    """Conversations in rows of `sequence` tokens; `packed`: several in a row.

    Positions start again with each, which is how the library keeps one from seeing another.
    """

    def __init__(self, pairs: Pairs, sequence: int, packed: bool) -> None:
        self.pairs, self.sequence, self.packed = pairs, sequence, packed
        lengths = np.diff(pairs.offsets)
        self.rows = pack_lengths(lengths, sequence if packed else 0)
        self.tokens = np.array([lengths[row].sum() for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return self.tokens[ids]

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Batch:
        return self.padded(ids, keys, len(ids))

    def padded(self, ids: np.ndarray, keys: np.ndarray, rows: int) -> Batch:
        tokens_RS, places_RS = np.zeros((2, rows, self.sequence), np.int64)
        labels_RS = np.full((rows, self.sequence), NOT_COUNTED, np.int64)
        for row, number in enumerate(ids):
            at = 0
            for member in self.rows[number]:
                tokens, labels = self.pairs.text_ids(member), self.pairs.target_ids(member)
                end = at + len(tokens)
                tokens_RS[row, at:end], places_RS[row, at:end] = tokens, np.arange(len(tokens))
                labels_RS[row, at : end - 1] = labels[1:]
                at = end
        inputs = {"input_ids": tokens_RS, **({"position_ids": places_RS} if self.packed else {})}
        return Batch({name: torch.from_numpy(value) for name, value in inputs.items()}, torch.from_numpy(labels_RS))

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[Batch]:
        return [self.padded(*cut, most) for cut in cuts]
