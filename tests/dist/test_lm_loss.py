"""The chunked loss with the vocabulary spread over ranks: the numbers of one rank."""

import pytest
import torch
from spread_loss import compare_all

from paceline.launch.local import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

CASES = [(11, torch.float64), (1, torch.float64), (64, torch.float32)]  # of a vocabulary of 1 a rank has nothing


def test_a_spread_vocabulary_gives_the_same_losses_and_gradients():
    assert run_ranks(compare_all, (CASES,), 2) == [len(CASES)] * 2
