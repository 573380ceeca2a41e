"""The chunked loss with the vocabulary spread over ranks: the numbers of one rank."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from paceline.launch.environment import detect_rank
from paceline.launch.local import run_ranks
from paceline.launch.process_group import join_ranks
from paceline.nn.chunked_loss import compute_chunked_losses, split_vocabulary

pytestmark = pytest.mark.usefixtures("warm_ranks")

CASES = [(11, torch.float64), (1, torch.float64), (64, torch.float32)]  # of a vocabulary of 1 a rank has nothing


def compare_all(cases):
    place = detect_rank(os.environ)
    with join_ranks(place, "cpu", 1, 120):
        for vocab, precision in cases:
            compare(place.rank, place.world, vocab, precision)
    return len(cases)


def compare(rank, ranks, vocab, precision):
    torch.manual_seed(0)
    x, whole = torch.randn(3, 7, 8, dtype=precision), torch.randn(vocab, 8, dtype=precision)
    x.requires_grad_()
    whole.requires_grad_()
    targets = torch.randint(0, vocab, (3, 7))
    targets[1, 3:] = -100
    losses = F.cross_entropy((x @ whole.T).flatten(0, 1), targets.flatten(), reduction="none").view(3, 7).sum(1)
    expected = torch.autograd.grad(2 * losses.sum(), (x, whole))
    first, rows = split_vocabulary(vocab, ranks, rank)
    part = whole.detach()[first : first + rows].clone().requires_grad_()
    ours = compute_chunked_losses(x, part, targets, 4, dist.group.WORLD, first)
    grads = torch.autograd.grad(2 * ours.sum(), (x, part))
    close = {"rtol": 0, "atol": 1e-10 if precision == torch.float64 else 1e-4}
    torch.testing.assert_close(ours, losses, **close)
    torch.testing.assert_close(grads[0], expected[0], **close)
    torch.testing.assert_close(grads[1], expected[1][first : first + rows], **close)


def test_a_spread_vocabulary_gives_the_same_losses_and_gradients():
    assert run_ranks(compare_all, (CASES,), 2) == [len(CASES)] * 2
