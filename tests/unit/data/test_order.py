"""The data order: a pure function of (seed, epoch, position), divided without loss."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import Order, derive_sample_keys, permute, split_by_cost


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_a_position_does_not_depend_on_what_is_asked_with_it():
    n = 46_387
    whole = permute(np.arange(n), n, 7, 3)
    some = np.array([46_386, 0, 1234, 1234])
    assert (permute(some, n, 7, 3) == whole[some]).all()


def test_epochs_and_seeds_give_other_orders():
    n = 10_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, a in enumerate(orders):
        assert (a == np.arange(n)).mean() < 0.01
        for b in orders[i + 1 :]:
            assert (a == b).mean() < 0.01


def test_the_order_looks_random():
    """Neighbours are not related and positions are spread evenly: a chi-squared test over 100 cells."""
    n = 100_000
    order = permute(np.arange(n), n, 0, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    table = np.histogram2d(np.arange(n), order, bins=10)[0]
    assert ((table - n / 100) ** 2 / (n / 100)).sum() < 150  # 81 degrees of freedom: 1 in 10^5 is 139


@given(
    cost=st.lists(st.integers(1, 300), min_size=1, max_size=200),
    shares=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_splitting_loses_nothing_and_is_even(cost, shares):
    cost = np.array(cost)
    split = split_by_cost(cost, shares)
    assert sorted(np.concatenate(split)) == list(range(len(cost)))
    sizes = [len(share) for share in split]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(cost[share]) >= 0).all() for share in split)


def test_splitting_balances_cost():
    cost = np.random.default_rng(0).integers(20, 120, 128)
    totals = [cost[share].sum() for share in split_by_cost(cost, 4)]
    assert (max(totals) - min(totals)) / np.mean(totals) < 0.01


def test_seen_counts_samples_over_uneven_epochs():
    order = Order(103, 10, seed=0)
    assert [order.seen(s) for s in (0, 1, 10, 11, 12, 22)] == [0, 10, 100, 103, 113, 206]
    assert order.global_batch(10).seen + len(order.global_batch(10).ids) == order.seen(11)


def test_sample_keys_depend_on_sample_epoch_and_seed_only():
    ids = np.arange(1000)
    keys = derive_sample_keys(ids, 0, 0)
    assert (derive_sample_keys(ids[::-1], 0, 0) == keys[::-1]).all()
    assert len(set(keys)) == 1000
    assert (keys != derive_sample_keys(ids, 0, 1)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**31
