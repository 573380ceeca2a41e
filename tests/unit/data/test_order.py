"""The data order: a pure function of (seed, epoch, position), divided without loss."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import Order, deal, one_by_one, permute, sample_keys, serve, share
from paceline.layout import Layout


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
    hands=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_dealing_loses_nothing_and_is_even(cost, hands):
    cost = np.array(cost)
    dealt = deal(cost, hands)
    assert sorted(np.concatenate(dealt)) == list(range(len(cost)))
    sizes = [len(hand) for hand in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(cost[hand]) >= 0).all() for hand in dealt)


def test_dealing_balances_cost():
    cost = np.random.default_rng(0).integers(20, 120, 128)
    totals = [cost[hand].sum() for hand in deal(cost, 4)]
    assert (max(totals) - min(totals)) / np.mean(totals) < 0.01


class Numbers:
    """Samples that are their own number."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def cost(self, ids):
        return ids % 7 + 1

    def batch(self, ids, keys):
        return ids, keys


def mine(turn, samples, layout, rank):
    (serving,) = share([turn], samples, layout, rank, one_by_one(samples))
    return serving


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_every_sample_once_per_epoch_on_any_layout(ranks, micro_batch):
    samples, epochs = Numbers(103), 3
    order = Order(103, 10, seed=5)
    layout = Layout("ddp", ranks, 10, micro_batch)
    seen = {epoch: [] for epoch in range(epochs)}
    for step in range(order.steps_per_epoch * epochs):
        servings = [mine(order.turn(step), samples, layout, rank) for rank in range(ranks)]
        assert len({len(s.passes) for s in servings}) == 1, "ranks make the same number of passes"
        batch = [part.batch[0] for s in servings for part in s.passes if part.weight]
        assert sorted(np.concatenate(batch)) == sorted(order.turn(step).ids)
        assert max(len(b) for b in batch) <= micro_batch
        seen[order.turn(step).epoch] += np.concatenate(batch).tolist()
    assert all(sorted(ids) == list(range(103)) for ids in seen.values())


def test_a_tail_smaller_than_the_ranks_gives_stand_ins_of_weight_zero():
    order = Order(11, 10, seed=0)
    servings = [mine(order.turn(1), Numbers(11), Layout("ddp", 4, 10, 3), rank) for rank in range(4)]
    assert sum(part.weight for s in servings for part in s.passes) == 1


def test_seen_counts_samples_over_uneven_epochs():
    order = Order(103, 10, seed=0)
    assert [order.seen(s) for s in (0, 1, 10, 11, 12, 22)] == [0, 10, 100, 103, 113, 206]
    assert order.turn(10).seen + len(order.turn(10).ids) == order.seen(11)


def test_sample_keys_depend_on_sample_epoch_and_seed_only():
    ids = np.arange(1000)
    keys = sample_keys(ids, 0, 0)
    assert (sample_keys(ids[::-1], 0, 0) == keys[::-1]).all()
    assert len(set(keys)) == 1000
    assert (keys != sample_keys(ids, 0, 1)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**31


def test_serving_ahead_keeps_order_and_hands_over_errors():
    layout, order = Layout("single", 1, 10, 10), Order(103, 10, 0)
    for at_once in (1, 4):
        served = list(serve(Numbers(103), order, layout, 0, 3, 27, at_once=at_once))
        assert [s.turn.step for s in served] == list(range(3, 27))
        assert all((s.turn.ids == order.turn(s.turn.step).ids).all() for s in served)

    class Broken(Numbers):
        def batch(self, ids, keys):
            raise ValueError("row 17 is broken")

    with pytest.raises(ValueError, match="row 17"):
        list(serve(Broken(103), order, layout, 0, 0, 5))
