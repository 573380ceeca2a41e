"""What `check` compares."""

import torch

from paceline.trials.check import TOLERANCE, compare_weights


def test_whole_numbers_do_not_hide_a_difference_of_weights():
    """The state of a random generator is a number of nine digits."""
    state = {"seed": torch.tensor([987654321, 7])}
    ours, theirs = ({"layer": torch.full((8,), value), **state} for value in (1.0, 1.01))
    found = compare_weights(ours, theirs)
    assert found.value > TOLERANCE["fp32"]
    assert found.where == "layer"
    assert compare_weights(state, {"seed": torch.tensor([1, 7])}).value > 0.5, "where there is nothing else"
