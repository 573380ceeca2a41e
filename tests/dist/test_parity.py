"""Promise 1: the answer does not depend on the layout."""

import math
import textwrap

import pytest

from paceline.errors import UserError
from paceline.trials.check import check, compute_relative_difference

pytestmark = pytest.mark.usefixtures("warm_ranks")

# what is trained, over which ranks and accumulations, for how many steps
ROWS = {
    "plain": ({}, [1, 2, 3, 4], [1, 4]),
    "dropout": ({"model.dropout": 0.2, "model.word_dropout": 0.1}, [1, 3], [1, 2]),
    "sgd": ({"train.optimizer": "sgd", "train.lr": 0.05, "train.clip": 0.0}, [1, 2], [1]),
    "lars": ({"train.optimizer": "lars", "train.lr": 0.2}, [1, 2], [1]),
    "lamb": ({"train.optimizer": "lamb"}, [1, 2], [1]),
    "fp16": ({"train.precision": "fp16"}, [1, 2], [1]),
    "bf16": ({"train.precision": "bf16"}, [1, 2], [1]),
    "fp64": ({"train.precision": "fp64"}, [1, 2], [1, 3]),
}


@pytest.mark.parametrize("row", ROWS)
def test_any_layout_gives_the_same_answer(small, row):
    changes, ranks, accumulate = ROWS[row]
    parity = check(small.replace(changes), ranks, accumulate, steps=12)
    assert len(parity.rows) == len(ranks) * len(accumulate)
    for found in parity.rows:
        assert found.agrees(parity.tolerance), found
        if row not in ("bf16", "fp16"):  # half precision rounds a text near the boundary to either side
            assert found.metrics["accuracy"] == parity.rows[0].metrics["accuracy"]
    assert parity.holds
    if row == "plain":
        assert parity.tolerance == 1e-5


BROKEN = """
import torch, torch.distributed as dist
from paceline.workloads.classifier.workload import Classifier

class Broken(Classifier):
    "Divides by its own count instead of leaving that to the loop: right on one rank, wrong on several."
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return (total / ranks if ranks > 1 else total), count
"""


def test_a_broken_workload_is_found_out(small, tmp_path):
    (tmp_path / "broken.py").write_text(textwrap.dedent(BROKEN))
    spec = small.replace({"workload": f"{tmp_path / 'broken.py'}:Broken"})
    parity = check(spec, [1, 2], steps=5)
    assert not parity.holds
    assert parity.rows[1].loss > 0.4
    assert "step" in parity.rows[1].worst.where


def test_a_check_of_one_layout_is_refused(small):
    with pytest.raises(UserError, match="--ranks 1,2"):
        check(small, [1])


def test_differences_are_relative_and_nan_agrees_with_nothing_finite():
    assert compute_relative_difference(1.0, 1.00001) == pytest.approx(1e-5, rel=1e-3)
    assert compute_relative_difference(None, None) == compute_relative_difference(None, 1.0) == math.inf
