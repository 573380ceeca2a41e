"""A model is tried out on the CPU only for a moment."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.planner.tracing import MAX_SECONDS, OpBudget, OverBudget


def large(*sides):
    """As large as it says, and no memory."""
    return torch.zeros(1).expand(*sides)


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(1 << 20, 1 << 20),
        lambda: torch.empty(1 << 30).normal_(),
        lambda: large(1 << 15, 1 << 15) @ large(1 << 15, 1 << 15),
        lambda: large(64, 4096, 4096) @ large(64, 4096, 4096),
        lambda: large(1 << 20, 1) * large(1 << 20),
        lambda: F.conv2d(large(8, 64, 1024, 1024), large(64, 64, 3, 3)),
        lambda: F.scaled_dot_product_attention(*[large(8, 16, 1 << 15, 128)] * 3),
        lambda: nn.init.orthogonal_(torch.empty(4096, 4096)),
        lambda: nn.LSTM(2048, 2048)(large(512, 64, 2048)),
        lambda: [torch.zeros(1) for _ in range(10**6)],
    ],
)
def test_what_would_take_long_is_not_begun(work):
    with pytest.raises(OverBudget), OpBudget():
        work()


def test_what_takes_a_moment_is_computed():
    layer = nn.Conv2d(3, 8, 3)
    with OpBudget() as budget:
        out = layer(torch.ones(2, 3, 8, 8)).sum()
        out.backward()
    assert 0 < budget.spent_s < MAX_SECONDS
    assert layer.weight.grad.abs().sum() > 0


def test_torch_does_not_import_its_compiler_for_it():
    """That takes as long as all else that a plan does."""
    code = (
        "import sys, torch; from paceline.planner.tracing import OpBudget\n"
        "with OpBudget(): torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
