"""The data order: a pure function of (seed, epoch, position), divided without loss."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from counting import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Train
from paceline.data.order import (
    Order,
    count_evaluated,
    derive_sample_keys,
    describe_subset,
    permute,
    select_evaluated,
    split_by_cost,
    total_steps,
)
from paceline.data.prefetch import Loader, make_collate
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
    orders = [np.arange(n), *(permute(np.arange(n), n, seed, epoch) for seed in (0, 1) for epoch in (0, 1))]
    assert max((a == b).mean() for a, b in combinations(orders, 2)) < 0.01


@given(cost=st.lists(st.integers(1, 300), min_size=1, max_size=200), shares=st.integers(1, 12))
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


def test_sample_keys_depend_on_sample_epoch_and_seed_only():
    ids = np.arange(1000)
    keys = derive_sample_keys(ids, 0, 0)
    assert (derive_sample_keys(ids[::-1], 0, 0) == keys[::-1]).all()
    assert len(set(keys)) == 1000
    assert (keys != derive_sample_keys(ids, 0, 1)).all()
    assert keys.min() >= 0
    assert keys.max() < 2**31


CHUNK = 256


@pytest.mark.parametrize(
    ("given", "samples", "held_out", "expected"),
    [
        ({"epochs": 6, "global_batch": 128}, 120_000, 7600, 7600),
        ({"epochs": 1, "global_batch": 64}, 4924, 544, 544),
        ({"steps": 3, "global_batch": 128}, 200_000, 19_140, 4 * CHUNK),
        ({"steps": 1000, "global_batch": 16, "evaluate_every": 500}, 200_000, 19_140, 4000),
        ({"epochs": 2, "evaluate_every": 10**6}, 30_000, 50_000, 30_000),
        ({"steps": 3, "evaluate_on": "all"}, 200_000, 19_140, 19_140),
        ({"steps": 3, "evaluate_on": 100}, 200_000, 19_140, 100),
        ({"steps": 3, "evaluate_on": 10**6}, 200_000, 19_140, 19_140),
    ],
)
def test_an_evaluation_costs_little_beside_the_training_before_it(given, samples, held_out, expected):
    train = Train(**given)
    order = Order(samples, train.global_batch, train.seed)
    assert count_evaluated(train, order, held_out, CHUNK) == expected
    assert (f"all {held_out:,} held-out" in describe_subset(train, order, held_out, CHUNK)) == (expected == held_out)


def test_the_part_is_fixed_spread_over_the_split_and_in_its_order():
    ids = select_evaluated(19_140, 1024)
    assert len(set(ids.tolist())) == 1024
    assert (np.diff(ids) > 0).all()
    assert ids[0] < 200
    assert ids[-1] > 18_900
    assert (ids == select_evaluated(19_140, 1024)).all()
    assert select_evaluated(5, 9).tolist() == [0, 1, 2, 3, 4]


def mine(step, order, samples, layout, rank):
    (batch,) = loader(samples, order, layout, rank).load([order.global_batch(step)])
    return batch


def loader(samples, order, layout, rank=0, at_once=1):
    return Loader(samples, order, layout, rank, make_collate(samples.batch), at_once)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_every_sample_once_per_epoch_on_any_layout(ranks, micro_batch):
    samples, epochs = Numbers(103), 3
    order = Order(103, 10, seed=5)
    layout = Layout("ddp", ranks, 10, micro_batch)
    seen = {epoch: [] for epoch in range(epochs)}
    for step in range(order.steps_per_epoch * epochs):
        of_ranks = [mine(step, order, samples, layout, rank) for rank in range(ranks)]
        assert len({len(b.micro_batches) for b in of_ranks}) == 1, "ranks have the same number of micro-batches"
        batch = [micro.batch for b in of_ranks for micro in b.micro_batches if micro.weight]
        assert sorted(np.concatenate(batch)) == sorted(order.global_batch(step).ids)
        assert max(len(b) for b in batch) <= micro_batch
        seen[order.global_batch(step).epoch] += np.concatenate(batch).tolist()
    assert all(sorted(ids) == list(range(103)) for ids in seen.values())


def test_a_growing_batch_takes_every_sample_once_and_starts_anywhere():
    train = Train(epochs=4, global_batch={0: 10, 7: 50, 13: 40})
    order = Order.of(train, 103)
    steps = total_steps(train, order)
    batches = list(order.global_batches(0, steps))
    assert [len(b.ids) for b in batches] == [10] * 7 + [33] + [50, 50, 3] + [50, 50, 3] + [40, 40, 23]
    assert [b.seen for b in batches] == [order.seen(step) for step in range(steps)]
    assert [b.seen for b in batches] == [sum(len(b.ids) for b in batches[:i]) for i in range(steps)]
    for epoch in range(4):
        mine = [b for b in batches if b.epoch == epoch]
        assert sorted(np.concatenate([b.ids for b in mine])) == list(range(103))
        assert order.first_step(epoch) == mine[0].step
    assert [step for step in range(1, steps + 1) if order.is_epoch_end(step)] == [8, 11, 14, 17]
    for batch in batches:
        assert order.global_batch(batch.step).ids.tolist() == batch.ids.tolist()
    assert (train.global_batch, train.count_samples(9), train.count_samples(3)) == (50, 170, 30)


def test_a_tail_smaller_than_the_ranks_gives_stand_ins_of_weight_zero():
    order = Order(11, 10, seed=0)
    of_ranks = [mine(1, order, Numbers(11), Layout("ddp", 4, 10, 3), rank) for rank in range(4)]
    assert sum(micro.weight for b in of_ranks for micro in b.micro_batches) == 1
    padding = [replace(loader(Numbers(11), order, Layout("ddp", 4, 10, 3), rank), pads_empty=True) for rank in range(4)]
    micros = [micro for one in padding for micro in one.load([order.global_batch(1)])[0].micro_batches]
    assert [len(micro.batch) for micro in micros] == [micro.weight for micro in micros], "no sample of others"


@pytest.mark.parametrize("at_once", [1, 4])
def test_prefetching_keeps_order_and_hands_over_errors(at_once, monkeypatch):
    samples, order = Numbers(103), Order(103, 10, 0)
    found = list(loader(samples, order, Layout("single", 1, 10, 10), 0, at_once).prefetch(3, 27))
    assert [b.global_batch.step for b in found] == list(range(3, 27))
    assert all((b.global_batch.ids == order.global_batch(b.global_batch.step).ids).all() for b in found)
    monkeypatch.setattr(samples, "batch", lambda ids, keys: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader(samples, order, Layout("single", 1, 10, 10), 0, at_once).prefetch(0, 5))
