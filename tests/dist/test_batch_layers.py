"""Batch norm and dropout do not depend on the layout, in a model that knows nothing of it, nor on a resume."""

from __future__ import annotations

import textwrap

import pytest

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.trainer.explain import derive_facts
from paceline.trainer.run import build_resumed_spec
from paceline.trials.check import TOLERANCE, check, compare_weights
from paceline.workload import build_workload
from results import check_holds

pytestmark = pytest.mark.usefixtures("warm_ranks")

MODELS = """
import torch, torch.nn.functional as F
from torch import nn
from paceline import Workload

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.Dropout2d(0.1)
    def forward(self, x): return F.relu(x + self.drop(self.norm(self.conv(x))))

class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, width, 3), nn.ModuleList(Block(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, 0.1, batch_first=True)
        self.hidden, self.norm, self.drop = nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks: x = block(x)
        x = x.flatten(2).mT
        x = self.drop(F.relu(self.norm(self.hidden((x + self.attention(x, x, x)[0]).mean(1)))))
        return self.head(F.dropout(self.drop(x), 0.1, self.training))

class Own(Workload):
    def model(self): return Net()
    def data(self, split):
        drawn = torch.Generator().manual_seed(len(split))
        samples = 44 if split == "train" else 9
        return torch.randn(samples, 1, 6, 6, generator=drawn), torch.randint(0, 3, (samples,), generator=drawn)
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

class Bytes(Own):
    "Bytes that the loss makes fp32."
    scale = 1.0
    def data(self, split):
        x, y = super().data(split)
        return (x * 40 + 128).clamp(0, 255).to(torch.uint8), y
    def loss(self, model, batch):
        x = batch[0] / 255 + batch[0].float() / 255
        return self.scale * F.cross_entropy(model(x), batch[1], reduction="sum"), len(batch[1])

class Scaled(Bytes):
    "A wrong scale on several ranks."
    def loss(self, model, batch):
        self.scale = 1 + 1e-5 * torch.distributed.is_initialized()
        return super().loss(model, batch)

class Singles(Bytes):
    "Cannot be computed in fp64."
    def loss(self, model, batch):
        if next(model.parameters()).dtype != torch.float32: raise TypeError("kernels for fp32 alone")
        return super().loss(model, batch)

class Jumping(Own):
    "A metric that rounding changes altogether."
    wrong = 0
    def evaluate(self, model, batch):
        wrong = self.wrong * torch.distributed.is_initialized()
        return {**super().evaluate(model, batch), "jump": (1e4 * model(batch[0]).double()).sin().sum() * (1 + wrong)}

class Miscounted(Jumping):
    "Wrong on several ranks."
    wrong = 1

class Draws(Own):
    def loss(self, model, batch): return super().loss(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))

    def spec(kind="Own", **values):
        train = {"steps": 4, "global_batch": 24, "lr": 1e-3, "optimizer": "sgd", "clip": 0}
        train |= {"schedule": "constant", "warmup": 0}
        parallel = {"threads": 1, "timeout_s": 120, "device": "cpu"}
        run = {"workload": f"{tmp_path}/models.py:{kind}", "train": train, "parallel": parallel}
        return build_spec(run).replace(values)

    return spec


def test_ranks_and_passes_do_not_matter(own):
    """The last batch of an epoch has 20 samples: groups of 6, 6, 6 and 2 on up to 4 ranks."""
    parity = check_holds(own(), [1, 2, 4], [1, 2], steps=4)
    assert [(row.ranks, row.accumulate) for row in parity.rows] == [(n, k) for n in (1, 2, 4) for k in (1, 2)]


def test_rounding_is_told_from_a_mistake_in_fp64(own, monkeypatch):
    """All layouts differ by more than this tolerance, as those of deep models do after a few steps."""
    monkeypatch.setitem(TOLERANCE, "fp32", 1e-9)
    rounded = check(own("Bytes"), [1, 2], [1, 2], steps=2)
    assert rounded.holds, rounded.rows
    assert 0 < max(rounded.in_fp64.values()) < 1e-13
    mistaken = check(own("Scaled"), [1, 2], steps=2)
    assert not mistaken.holds
    assert mistaken.in_fp64["2 ranks"] == pytest.approx(1e-5, rel=0.1)
    unknown = check(own("Singles"), [1, 2], steps=2)
    assert not unknown.holds
    assert not unknown.in_fp64
    assert "kernels for fp32 alone" in unknown.no_fp64
    assert unknown.no_fp64 in unknown.verdict


def test_metrics_that_jump_with_rounding_in_16_bits_are_computed_in_fp64(own):
    values = {"train.precision": "bf16", "train.evaluate_on": 9}
    jumping, wrong = (check(own(kind, **values), [1, 2], steps=2) for kind in ("Jumping", "Miscounted"))
    for parity in (jumping, wrong):
        (row,) = parity.rows[1:]
        assert row.trains_alike(parity.tolerance)
        assert not row.agrees(parity.tolerance)
    assert jumping.holds
    assert jumping.in_fp64["2 ranks"] < 1e-8
    assert not wrong.holds
    assert wrong.in_fp64["2 ranks"] == pytest.approx(0.5)


def test_strategies_and_recomputed_layers_do_not_matter(own):
    spec = own(**{"parallel.activation_checkpointing": "full"})
    check_holds(spec, layouts=["single", "fsdp:2", "zero1:2"], steps=3)


def test_a_run_keeps_its_groups_on_other_ranks(own, tmp_path):
    whole = train(own(), tmp_path / "whole", show=False)
    half = train(own(**{"train.steps": 2}), tmp_path, show=False)
    resumed = build_resumed_spec(half.path, {"train.steps": 4, "parallel.ranks": 4})
    rest = train(resumed, resume=half.path, show=False)
    assert compare_weights(whole.weights(), rest.weights()).value < 1e-5


def test_what_still_depends_on_the_layout_is_said_on_one_line(own, tmp_path, capsys):
    def said(spec):
        train(spec.replace({"train.steps": 1}), tmp_path)
        return [line for line in capsys.readouterr().out.splitlines() if "depends on the layout" in line]

    assert not said(own())
    (draws,) = said(own("Draws"))
    assert "torch's generator" in draws
    (norms,) = said(own(**{"train.batchnorm_group": "as_is"}))
    assert "blocks.0.norm (BatchNorm2d), blocks.1.norm (BatchNorm2d), norm (BatchNorm1d)" in norms


@pytest.mark.parametrize(("ranks", "group"), [(1, 24), (2, 12)])
def test_explain_states_the_groups_of_the_layout(own, ranks, group):
    spec = own(**{"parallel.ranks": ranks})
    lines = derive_facts(spec, build_workload(spec), 72)
    assert [line for line in lines if f"groups of {group} samples" in line]


@pytest.mark.parametrize(("group", "said"), [(7, "use 24"), (48, "use 24"), (1, "2"), ("sync_", "sync")])
def test_groups_that_do_not_divide_a_pass_are_refused(own, group, said, tmp_path):
    with pytest.raises(UserError, match=said) as caught:
        train(own(**{"train.batchnorm_group": group}), tmp_path, show=False)
    assert caught.value.key == "train.batchnorm_group"
