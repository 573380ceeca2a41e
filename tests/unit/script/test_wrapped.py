"""A model as a script gets it back from `run.prepare` on several ranks."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.script.api import ModelView


@pytest.fixture
def wrapping():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ModelView(DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        dist.destroy_process_group()


def test_copies_and_files_of_the_model_are_of_the_model_itself(wrapping):
    model, file, x = wrapping.model, io.BytesIO(), torch.ones(1, 2)
    before = model(x).detach()
    torch.save(model, file)
    twins = copy.deepcopy(model), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    wrapping.called = False
    with torch.no_grad():
        model.weight += 1
    for twin in twins:
        assert type(twin) is nn.Linear
        assert torch.equal(twin(x), before)
    assert not wrapping.called
    assert not torch.equal(model(x), before)
