"""The batches of a rank: every sample once on any layout, made ahead in their order."""

import numpy as np
import pytest

from paceline.data.order import Order
from paceline.data.prefetch import Loader, make_collate
from paceline.layout import Layout


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
        batch = [micro.batch[0] for b in of_ranks for micro in b.micro_batches if micro.weight]
        assert sorted(np.concatenate(batch)) == sorted(order.global_batch(step).ids)
        assert max(len(b) for b in batch) <= micro_batch
        seen[order.global_batch(step).epoch] += np.concatenate(batch).tolist()
    assert all(sorted(ids) == list(range(103)) for ids in seen.values())


def test_a_tail_smaller_than_the_ranks_gives_stand_ins_of_weight_zero():
    order = Order(11, 10, seed=0)
    of_ranks = [mine(1, order, Numbers(11), Layout("ddp", 4, 10, 3), rank) for rank in range(4)]
    assert sum(micro.weight for b in of_ranks for micro in b.micro_batches) == 1


def test_prefetching_keeps_order_and_hands_over_errors():
    layout, order = Layout("single", 1, 10, 10), Order(103, 10, 0)
    for at_once in (1, 4):
        found = list(loader(Numbers(103), order, layout, at_once=at_once).prefetch(3, 27))
        assert [b.global_batch.step for b in found] == list(range(3, 27))
        assert all((b.global_batch.ids == order.global_batch(b.global_batch.step).ids).all() for b in found)

    class Broken(Numbers):
        def batch(self, ids, keys):
            raise ValueError("row 17 is broken")

    with pytest.raises(ValueError, match="row 17"):
        list(loader(Broken(103), order, layout).prefetch(0, 5))
