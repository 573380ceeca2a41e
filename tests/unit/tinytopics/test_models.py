"""The model as a module, and its loss."""

import pytest
import torch
from torch.testing import assert_close

from paceline.tinytopics.models import NeuralPoissonNMF, poisson_nmf_loss


def test_it_takes_factors_and_gives_them_back(tmp_path):
    L, F = torch.rand(7, 3).softmax(1), torch.rand(3, 11).softmax(1)
    F[0] = torch.tensor([1e-20, *[0.1] * 10])
    model = NeuralPoissonNMF(7, 11, 3)
    assert all(0 <= logits.min() < logits.max() <= 0.1 for logits in model.parameters())
    model.take(L, F)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = NeuralPoissonNMF(7, 11, 3)
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_close(again.get_normalized_L(), L)
    assert_close(again.get_normalized_F(), F, rtol=1e-5, atol=1e-25)
    assert not again.get_normalized_F().requires_grad
    assert_close(again(torch.arange(7)), L @ F)


def test_the_loss_is_least_where_expectations_are_the_counts():
    X = torch.tensor([[3.0, 0.0], [1.0, 5.0]])
    expected = torch.tensor([[2.0, 0.5], [1.0, 4.0]], requires_grad=True)
    by_hand = 2 - 3 * 0.6931472 + 0.5 + 1 + 4 - 5 * 1.3862944
    loss = poisson_nmf_loss(X, expected)
    assert loss.item() == pytest.approx(by_hand)
    assert poisson_nmf_loss(X, X) < loss
    loss.backward()
    assert_close(expected.grad, torch.tensor([[1 - 3 / 2, 1.0], [0.0, 1 - 5 / 4]]))
    assert torch.isfinite(poisson_nmf_loss(X, torch.zeros(2, 2)))
