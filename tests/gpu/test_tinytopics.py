"""Fits through the interface of tinytopics on a GPU: the answer of the CPU."""

import pytest
import torch

import paceline.tinytopics as tt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("given_on", ["cpu", "cuda"])
def test_a_fit_on_the_device_is_that_of_the_cpu(given_on):
    tt.set_random_seed(1)
    X, _, _ = tt.generate_synthetic_data(500, 300, 4, avg_doc_length=5000)
    _, on_cpu = tt.fit_model(X, 4, num_epochs=200, device=torch.device("cpu"))
    model, losses = tt.fit_model(X.to(given_on), 4, num_epochs=200, device=torch.device("cuda"))
    assert model.device == torch.device("cuda")
    assert model.F.is_cuda
    assert model.get_normalized_L().device == torch.device("cpu")
    assert losses[-1] == pytest.approx(on_cpu[-1], rel=1e-5)
    assert losses[:20] == sorted(losses[:20], reverse=True), "the loss of every epoch, not of every fifth"
    assert len(set(losses[:5])) == 5
