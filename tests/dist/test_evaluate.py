"""Evaluation is exact: every sample once, and the same bits on any number of ranks."""

import pytest
from layout_rows import evaluate_again

from paceline import train
from paceline.launch.local import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


def test_the_same_weights_score_the_same_on_any_number_of_ranks(small, tmp_path):
    trained = train(small, tmp_path / "runs", show=False)
    found = {1: [evaluate_again(trained.path, small, tmp_path)]}
    for ranks in (2, 3):
        spec = small.replace({"parallel.ranks": ranks})
        found[ranks] = run_ranks(evaluate_again, (str(trained.path), spec, str(tmp_path)), ranks)
    told = trained.summary.evaluation
    reference = {"n": told.evaluated, "of": told.evaluated, **trained.metrics, **told.arrays}
    assert len(reference["confusion"]) == len(reference["classes"]) == 4
    assert reference["n"] > 256, "more than one chunk"
    for ranks, answers in found.items():
        assert answers == [reference] * ranks, "not within a tolerance: equal"
