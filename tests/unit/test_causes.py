"""A cause is named where the answer depends on the layout, and nothing is named where it does not."""

import random
import re

import numpy as np
import pytest
import torch

from paceline.config import build_spec
from paceline.trials.check import TOLERANCE, compare_weights
from paceline.trials.layout_causes import LayoutCause, find_layout_causes, seed_all_generators

MODELS = """
import numpy as np, torch, torch.nn.functional as F
from torch import nn
from paceline import Workload

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))

class Rows:
    def __len__(self): return len(X)
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys): return X[ids]

class Net(nn.Module):
    def __init__(self, *middle):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(6, 8), nn.Sequential(*middle), nn.Linear(8, 1)
    def forward(self, x): return self.out(self.middle(torch.tanh(self.first(x))))[:, 0]

class Plain(Workload):
    middle = ()
    def model(self): return Net(*(make() for make in self.middle))
    def data(self, split): return Rows() if split == "train" else None
    def loss(self, model, x): return ((model(x) - x.sum(1)) ** 2).sum(), len(x)

class Calm(Plain): middle = (lambda: nn.GroupNorm(2, 8), lambda: nn.Dropout(0.0), lambda: nn.LayerNorm(8))
class BatchNorm(Plain): middle = (lambda: nn.BatchNorm1d(8),)
class SyncBatchNorm(Plain): middle = (lambda: nn.SyncBatchNorm(8),)

class KeepsMean(nn.Module):
    "Uses nothing of the batch, but remembers it."
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
    def forward(self, x):
        if self.training: self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x
class Remembers(Plain): middle = (KeepsMean,)

class Noise(nn.Module):
    def forward(self, x): return x * (torch.rand_like(x) > 0.3)
class Functional(nn.Module):
    def forward(self, x): return F.dropout(x, 0.3, self.training)
class Keyed(Plain): middle = (Functional, lambda: nn.Dropout(0.3), lambda: nn.BatchNorm1d(8))
class OwnDraws(Plain): middle = (Noise,)
class Both(Plain): middle = (lambda: nn.BatchNorm1d(8), Noise)
class LossDraws(Plain):
    def loss(self, model, x): return ((model(x + float(np.random.normal())) - x.sum(1)) ** 2).sum(), len(x)

class Mean(Plain):
    def loss(self, model, x): return ((model(x) - x.sum(1)) ** 2).mean(), len(x)
class Count(Plain):
    def loss(self, model, x): return ((model(x) - x.sum(1)) ** 2).sum(), 1

class Centre(nn.Module):
    def forward(self, x): return x - x.mean(0)
class Mixes(Plain): middle = (nn.Tanh, Centre)
class Contrast(Plain):
    def loss(self, model, x): return torch.pdist(model(x)[:, None] * x).sum() + 0 * model(x).sum(), len(x)

class Weights(Plain):
    def model(self):
        net = Net()
        net.first.weight.data += float(np.random.default_rng().normal())
        return net
class Data(Plain):
    def data(self, split):
        rows = Rows()
        shift = float(np.random.default_rng().normal())
        rows.batch = lambda ids, keys: X[ids] + shift
        return rows
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "models.py"
    file.write_text(MODELS)
    given, parallel = {"steps": 2, "global_batch": 12, "batchnorm_group": "as_is"}, {"threads": 1, "device": "cpu"}
    return lambda kind, **train: build_spec(
        {"workload": f"{file}:{kind}", "train": given | train, "parallel": parallel}
    )


@pytest.mark.parametrize(
    ("kind", "cause", "named"),
    [
        ("BatchNorm", LayoutCause.BATCH_STATISTICS, r"middle\.0 \(BatchNorm1d\): .*batchnorm_group=auto"),
        ("SyncBatchNorm", LayoutCause.SYNCHRONISED_STATISTICS, r"middle\.0 \(SyncBatchNorm\)"),
        ("Remembers", LayoutCause.BATCH_STATISTICS, r"middle\.0 \(KeepsMean\)"),
        ("OwnDraws", LayoutCause.OWN_DRAWS, r"middle\.0 draws from torch's generator"),
        ("LossDraws", LayoutCause.OWN_DRAWS, r"loss\(\) draws from numpy's"),
        ("Mean", LayoutCause.MEAN, r"the loss was [\d.]+ for 12 samples, and [\d.]+ for 8 of them"),
        ("Count", LayoutCause.COUNT, r"1 for 12 and 1 for 8 and 1 for 4"),
        ("Mixes", LayoutCause.SHARED, r"middle\.1 gives a sample another value"),
        ("Contrast", LayoutCause.SHARED, r"loss\(\) gives a sample another value"),
        ("Weights", LayoutCause.WEIGHTS, r"first\.weight"),
        ("Data", LayoutCause.DATA, r"data\('train'\) gives other samples"),
    ],
)
def test_the_cause_is_named_with_what_to_do(own, kind, cause, named):
    (found,) = find_layout_causes(own(kind))
    assert found.cause is cause
    assert re.search(named, str(found)), str(found)


@pytest.mark.parametrize(
    ("kind", "causes"),
    [("Plain", []), ("Calm", []), ("Both", [LayoutCause.BATCH_STATISTICS, LayoutCause.OWN_DRAWS])],
)
def test_nothing_is_named_without_evidence_and_each_of_two_causes_is(own, kind, causes):
    assert [found.cause for found in find_layout_causes(own(kind))] == causes


def test_groups_and_keys_leave_no_cause(own):
    assert not find_layout_causes(own("Keyed", batchnorm_group="auto"))


def test_a_check_that_fails_names_the_cause(own, tmp_path, ask):
    file = tmp_path / "run.yaml"
    train = "{global_batch: 12, batchnorm_group: as_is}"
    file.write_text(f"workload: {own('BatchNorm').workload}\ntrain: {train}\nparallel: {{threads: 1}}\n")
    answer = ask("check", file, "--ranks", 1, "--accumulate", "1,3", "--steps", 2)
    assert answer.code == 1
    assert "\n  cause: middle.0 (BatchNorm1d): statistics over the samples of one pass" in answer.err


def test_trying_out_leaves_the_generators_as_they_were(own):
    generators = (random.random, np.random.rand, lambda: float(torch.rand(())))

    seed_all_generators(3)
    expected = [draw() for draw in generators]
    seed_all_generators(3)
    find_layout_causes(own("Plain"))
    assert [draw() for draw in generators] == expected


def test_whole_numbers_do_not_hide_a_difference_of_weights():
    """The state of a random generator is a number of nine digits."""
    state = {"seed": torch.tensor([987654321, 7])}
    ours, theirs = ({"layer": torch.full((8,), value), **state} for value in (1.0, 1.01))
    found = compare_weights(ours, theirs)
    assert found.value > TOLERANCE["fp32"]
    assert found.where == "layer"
    assert compare_weights(state, {"seed": torch.tensor([1, 7])}).value > 0.5, "where there is nothing else"
