"""Attention and rotary positions against plain formulas."""

import torch

from paceline.nn.attention import build_rotary_tables, causal_attention, rotate


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
