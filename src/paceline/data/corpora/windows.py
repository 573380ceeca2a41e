"""A stream of tokens cut into samples of equal length, for models that predict the next token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.corpora.tokenised import Ids
from paceline.nn.chunked_loss import NOT_COUNTED


class LMBatch(NamedTuple):
    """Tokens (B, S) and what follows each of them (B, S); NOT_COUNTED where there is nothing to predict."""

    tokens: Tensor
    targets: Tensor


class Windows:
    """One split of a corpus, cut into samples of `sequence` tokens. Every token but the very first is predicted once.

    Sample i reads the tokens i × S … and predicts those one further on. The last may be shorter, and is filled up with
    targets that do not count.
    """

    def __init__(self, ids: Ids, sequence: int, half_only: bool = False) -> None:
        self.ids, self.sequence = ids, sequence
        self.half_only = half_only

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.sequence)

    def cost(self, ids: np.ndarray) -> NDArray[np.int64]:
        return np.minimum(self.sequence, len(self.ids) - 1 - np.asarray(ids, np.int64) * self.sequence)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> LMBatch:
        return self.padded(ids, keys, len(ids))

    def padded(self, ids: np.ndarray, keys: np.ndarray, rows: int) -> LMBatch:
        assert len(ids) <= rows, "more samples than rows"
        tokens_RS = np.zeros((rows, self.sequence), np.int64)
        targets_RS = np.full((rows, self.sequence), NOT_COUNTED, np.int64)
        for row, begin in enumerate(np.asarray(ids, np.int64) * self.sequence):
            window = self.ids[begin : begin + self.sequence + 1]
            tokens_RS[row, : len(window) - 1] = window[:-1]
            targets_RS[row, : len(window) - 1] = window[1:]
        return LMBatch(torch.from_numpy(tokens_RS), torch.from_numpy(targets_RS))

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[LMBatch]:
        return [self.padded(*cut, most) for cut in cuts]
