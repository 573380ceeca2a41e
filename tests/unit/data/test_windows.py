"""Samples of a language model: every token is predicted once, and rows that are added count nothing."""

import numpy as np
import pytest

from paceline.data.corpora.documents import Windows


def tokens_of(length):
    return np.random.default_rng(length).integers(0, 300, length).astype(np.uint16)


@pytest.mark.parametrize("length", [2, 65, 5001])
@pytest.mark.parametrize("sequence", [1, 7, 64, 10_000])
def test_every_token_is_predicted_exactly_once(length, sequence):
    ids = tokens_of(length)
    windows = Windows(ids, sequence)
    seen = np.zeros(len(ids), np.int64)
    samples = np.random.default_rng(1).permutation(len(windows))
    for some in np.array_split(samples, -(-len(samples) // 5)):
        batch = windows.batch(some, some)
        assert batch.tokens.shape == batch.targets.shape == (len(some), sequence)
        for i, tokens, targets in zip(some, batch.tokens.numpy(), batch.targets.numpy(), strict=True):
            counted = int((targets >= 0).sum())
            assert counted == windows.cost(np.array([i]))[0] > 0
            begin = i * sequence
            assert (tokens[:counted] == ids[begin : begin + counted]).all()
            assert (targets[:counted] == ids[begin + 1 : begin + counted + 1]).all()
            assert (targets[counted:] == -100).all()
            seen[begin + 1 : begin + counted + 1] += 1
    assert seen[0] == 0, "nothing is before the first end token"
    assert (seen[1:] == 1).all()


def test_padded_rows_count_nothing():
    windows = Windows(tokens_of(200), 16)
    ids = np.array([3, 1])
    plain, padded = windows.batch(ids, ids), windows.padded(ids, ids, 5)
    assert padded.tokens.shape == (5, 16)
    assert padded.tokens[:2].equal(plain.tokens)
    assert padded.targets[:2].equal(plain.targets)
    assert (padded.targets[2:] == -100).all()
