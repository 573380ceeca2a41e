"""How much is evaluated: a number that follows from the run file and the data, and the same samples each time."""

import numpy as np
import pytest

from paceline.config import Train
from paceline.data.order import Order, count_evaluated, describe_subset, select_evaluated

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
