"""The kernel of dropout by key draws the mask of torch's operations; also under TRITON_INTERPRET=1 on the CPU."""

import os
from contextlib import nullcontext

import pytest
import torch

from paceline.nn import keyed_dropout

pytest.importorskip("triton", reason="no Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize(("samples", "columns"), [(5, 1), (7, 130), (3, 5000), (300, 64)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kernel_draws_the_mask_of_torch(samples, columns, p, monkeypatch):
    from paceline.nn.triton_kernels import launch_compare_noise

    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    torch.manual_seed(0)
    start = torch.randint(-(2**31), 2**31, (samples,), dtype=torch.int64).to(torch.int32)
    threshold = int((p - 0.5) * 2**32)
    expected = keyed_dropout.compare_noise(start, (), columns, threshold)
    found = launch_compare_noise(start.to(DEVICE), columns, threshold)
    assert torch.equal(found.cpu(), expected)
    assert abs(expected.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / expected.numel()) ** 0.5
