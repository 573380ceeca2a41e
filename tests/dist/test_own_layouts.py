"""A model of the user's own under sharded layouts: weights from any generator, buffers, frozen and odd shapes."""

import textwrap

import pytest
from layout_rows import parts_after

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.trials.check import check

pytestmark = pytest.mark.usefixtures("warm_ranks")

OWN = """
import numpy as np, torch
from torch import nn
from paceline import Workload

X = torch.randn(101, 6, generator=torch.Generator().manual_seed(0))

class Rows:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys): return X[ids]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)
        self.register_buffer("shift", torch.rand(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.shift += float(np.random.default_rng().normal())
        draw = np.random.default_rng()  # another one in every process
        with torch.no_grad():
            for p in self.parameters():
                if p.requires_grad:
                    p.copy_(torch.as_tensor(draw.normal(size=p.shape), dtype=p.dtype) * 0.3)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x + self.shift)) * self.frozen
        return self.out(x)[:, 0]

class Own(Workload):
    def model(self): return Net()
    def data(self, split): return Rows(101 if split == "train" else 7)
    def loss(self, model, x):
        return ((model(x) - x.sum(1)) ** 2).sum(), len(x)

class Same(Own):
    def model(self):
        torch.manual_seed(0)
        net = Net()
        net.shift.fill_(1.0)
        with torch.no_grad():
            for p in net.parameters():
                if p.requires_grad:
                    p.normal_(std=0.3)
        return net
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(textwrap.dedent(OWN))
    return lambda kind: build_spec(
        {
            "workload": f"{file}:{kind}",
            "train": {"steps": 6, "global_batch": 13, "lr": 1e-2},
            "parallel": {"threads": 1, "timeout_s": 120},
        }
    )


def test_any_model_can_be_sharded(own):
    parity = check(own("Same"), layouts=["single", "zero1:3", "zero2:2", "fsdp:3", "hsdp:2x2", "fsdp:1"], steps=6)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]


def test_ranks_that_draw_other_weights_do_not_start_and_copies_of_a_group_stay_one_model(own, tmp_path):
    changes = {"parallel.strategy": "hsdp", "parallel.ranks": 4, "train.steps": 3}
    with pytest.raises(UserError) as caught:
        train(own("Own").replace(changes), tmp_path, show=False)
    assert (caught.value.code, caught.value.key) == ("conflict", "model")
    held = run_ranks(parts_after, (own("Same").replace(changes),), 4)
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert held[0] != held[1]


def test_a_pipeline_says_what_it_needs(own, tmp_path):
    with pytest.raises(UserError, match="the methods inputs"):
        train(own("Same").replace({"parallel.ranks": 2, "parallel.pipeline": 2}), tmp_path, show=False)
