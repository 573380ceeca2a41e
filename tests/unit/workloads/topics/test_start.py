"""The least-squares start on a CPU: planted topics are found, always the same for a seed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from paceline.workloads.topics.fitting.least_squares import SweepCounts, find_topics_by_least_squares


def planted(n=400, m=300, k=5, words=3000, seed=0):
    random = torch.Generator().manual_seed(seed)
    L, F = (torch.empty(*shape).exponential_(generator=random) for shape in ((n, k), (k, m)))
    L, F = L / L.sum(1, keepdim=True), F / F.sum(1, keepdim=True)
    return torch.poisson(words * (L @ F), generator=random), L, F


def start(X, k, **options):
    products = SimpleNamespace(multiply=lambda B: X @ B, multiply_t=lambda C: X.T @ C)
    return find_topics_by_least_squares(products, X.sum(1).double(), X.sum(0).double(), k, **options)


def cosines(F, Ft):
    unit = torch.nn.functional.normalize
    found = (unit(F, dim=1) @ unit(Ft, dim=0)).numpy()
    return found[linear_sum_assignment(-found)]


@pytest.mark.parametrize("options", [{}, {"turns": SweepCounts(sample=150)}])
def test_planted_topics_are_found(options):
    X, _, F = planted()
    Ft = start(X, 5, **options)
    assert cosines(F, Ft).min() > 0.98
    assert (Ft >= 0).all()
    torch.testing.assert_close(Ft.sum(0), torch.ones(5))


def test_a_seed_gives_the_same_start():
    X, _, _ = planted()
    first, second, other = start(X, 5, seed=3), start(X, 5, seed=3), start(X, 5, seed=4)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_empty_documents_and_terms_give_numbers():
    X, _, _ = planted(n=60, m=40)
    X[7], X[:, 11] = 0, 0
    assert torch.isfinite(start(X, 5)).all()


@pytest.mark.parametrize("rank", [1, 2])
def test_fewer_patterns_than_topics_give_numbers(rank):
    patterns = np.eye(rank, 30, dtype=np.float32).repeat(10, 0) * 5
    assert torch.isfinite(start(torch.from_numpy(patterns), 6)).all()
