"""Attention, rotary positions and packed texts against plain formulas, and against one text at a time."""

import numpy as np
import torch

from paceline.nn.attention import (
    average_texts,
    build_rotary_tables,
    causal_attention,
    compute_packed_attention,
    drop_features,
    drop_tokens,
    pack_padded,
    pack_texts,
    rotate,
)


def test_grouped_attention_is_that_of_repeated_keys():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    grouped = causal_attention(q, k, v)
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) / 2
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(grouped, expected)
    grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (grouped, expected))
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference)


def test_rotary_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    cos, sin = build_rotary_tables(20, 8, torch.device("cpu"), torch.float64)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(1, 20, 1, 8), cos, sin)[0, :, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[3, 1], scores[19, 17])
    torch.testing.assert_close(scores[0, 0], q @ k)
    assert not torch.isclose(scores[3, 1], scores[4, 1])
    assert build_rotary_tables(4, 8, torch.device("cpu"), torch.bfloat16)[0].dtype == torch.float32


LENGTHS = np.array([1, 3, 3, 7, 7, 7, 20])


def batch(lengths=LENGTHS, seed=0, keys=None):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, 50, n) for n in lengths]
    keys = np.arange(len(lengths)) * 7919 + 13 if keys is None else keys
    return texts, pack_texts(np.concatenate(texts), lengths, rng.integers(0, 4, len(lengths)), keys)


def test_attention_stays_within_a_text():
    _, packed = batch()
    q, k, v = torch.randn(3, len(packed.tokens), 2, 8)
    got = compute_packed_attention(q, k, v, packed)
    for begin, end in zip(packed.bounds, packed.bounds[1:], strict=False):
        scores = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end]) / 8**0.5
        want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[begin:end])
        torch.testing.assert_close(got[begin:end], want)


def test_dropout_has_the_right_rate_and_mean():
    lengths = np.full(64, 50)
    _, packed = batch(lengths)
    x = torch.ones(len(packed.tokens), 256)
    out = drop_features(x, 0.1, packed, site=3)
    assert abs((out == 0).float().mean() - 0.1) < 0.002
    assert abs(out.mean() - 1) < 0.002
    rows, columns = (out == 0).float().mean(1), (out == 0).float().mean(0)
    assert rows.std() < 1.3 * (0.09 / 256) ** 0.5, "no row is favoured"
    assert columns.std() < 1.3 * (0.09 / len(x)) ** 0.5, "no column is favoured"
    other = drop_features(x, 0.1, packed, site=4)
    both = ((out == 0) & (other == 0)).float().mean()
    assert abs(both - 0.01) < 0.002, "places are independent"
    masked = drop_tokens(packed, 0.15, 0, replacement=-1)
    assert abs((masked == -1).float().mean() - 0.15) < 0.02


def test_filling_changes_no_answer():
    _, packed = batch()
    labels, keys = packed.labels.numpy(), packed.keys.numpy()
    twice = [LENGTHS, LENGTHS[:3]]
    tokens = np.concatenate([packed.tokens.numpy(), packed.tokens.numpy()[:7]])
    filled, other = pack_padded(tokens, twice, [labels, labels[:3]], [keys, keys[:3]], most=9, longest=32)
    assert len(filled.tokens) % 256 == 0
    assert other.tokens[:7].long().equal(packed.tokens[:7])
    assert other.keys[:3].equal(packed.keys[:3])
    assert len(other.labels) == 10
    for name in ("tokens", "positions", "texts", "bounds", "labels", "keys"):
        whole, part = getattr(filled, name), getattr(packed, name)
        assert whole[: len(part)].to(part.dtype).equal(part), name
    assert len(filled.labels) == 10
    assert filled.bounds[-1] == len(filled.tokens)
    assert (filled.bounds.diff() > 0).all()
    assert filled.positions.max() < 32
    assert (filled.labels[len(LENGTHS) :] == -100).all()
    x = torch.randn(len(filled.tokens), 5)
    torch.testing.assert_close(
        average_texts(x, filled)[: len(LENGTHS)], average_texts(x[: len(packed.tokens)], packed), rtol=1e-5, atol=1e-6
    )
