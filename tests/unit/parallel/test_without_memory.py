"""Models that are built without memory for their parameters."""

import torch
from torch import nn

from paceline.parallel.parallelize import (
    allocate_parameters,
    build_without_memory,
    has_shared_parameters,
    has_transient_buffers,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(3, 4))
        self.first, self.second = weight, weight
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        self.down.weight = self.up.weight
        self.down.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 0.5), persistent=False)


def test_parameters_have_none_and_all_else_is_as_it_was():
    with build_without_memory():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert model.first is model.second
    assert model.up.weight is model.down.weight
    assert not model.down.bias.requires_grad
    assert model.scale.tolist() == [0.5, 0.5]
    assert has_transient_buffers(model)
    assert not has_transient_buffers(nn.BatchNorm1d(2))
    assert has_shared_parameters(model)
    assert not has_shared_parameters(nn.Linear(2, 2))
    allocate_parameters(model, torch.device("cpu"))
    assert not any(p.is_meta for p in model.parameters())
    assert model.scale.tolist() == [0.5, 0.5]
    assert not any(p.is_meta for p in nn.Linear(2, 2).parameters()), "afterwards all is as ever"
