"""Models that a layout cannot take are refused in words; a new strategy is a new layout."""

import math

import pytest
import torch
from torch import nn

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.parallel import fsdp, pipeline, tensor
from paceline.runlog.run_dir import RunDir
from paceline.trainer.run import build_resumed_spec
from paceline.trials.check import compare_weights
from paceline.workload import Workload


class Chain(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(4)


class Chained(Workload):
    def costs(self, model):
        return 0.0, [1.0] * len(model.layers), 0.0

    def stage(self, model, layers):
        return nn.Sequential(*(model.layers[i] for i in layers))


def layout(**parallel):
    return layout_of(build_spec({"parallel": parallel}))


def test_layers_that_share_a_weight_are_not_sharded():
    model = Chain()
    model.layers[3].weight = model.layers[1].weight
    with pytest.raises(UserError, match="1 and 3 share weight"):
        fsdp.reject_unshardable(model, list(model.layers), layout(ranks=2, strategy="fsdp"))


def test_a_single_number_is_not_sharded():
    model = Chain()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="temperature is a single"):
        fsdp.reject_unshardable(model, list(model.layers), layout(ranks=2, strategy="fsdp"))
    del model.temperature
    fsdp.reject_unshardable(model, list(model.layers), layout(ranks=2, strategy="fsdp"))


def test_a_weight_of_two_stages_is_a_tie():
    model, two = Chain(), layout(ranks=2, pipeline=2)
    workload = Chained(build_spec({}))
    stages, ties = pipeline.build_stages(workload, model, two, 0)
    assert (list(stages), len(stages[0]), ties) == ([0], 2, [])
    model.layers[3].weight = model.layers[0].weight
    (tie,) = pipeline.build_stages(workload, model, two, 0)[1]
    assert list(tie.held) == [0, 1]
    with pytest.raises(UserError, match=r"parallel\.pipeline=1"):
        pipeline.build_stages(workload, Chain(1), two, 0)


def test_on_a_part_of_the_sequence_every_weight_needs_a_rule():
    rules = {"layers.*": "column"}
    with pytest.raises(UserError, match="'norm': 'sequence'"):
        tensor.apply_tensor_parallel(Chain(), rules, None, sequence=True)
    with pytest.raises(UserError, match="'colum' is not known"):
        tensor.apply_tensor_parallel(Chain(), {"layers.*": "colum"}, None, sequence=False)


OLD = {"strategy": "fsdp", "ranks": 8, "tensor": 2, "pipeline": 2, "sequence": True, "offload": True, "micro_batch": 4}


@pytest.mark.parametrize(
    ("overrides", "parallel"),
    [
        (["parallel.strategy=ddp", "parallel.ranks=2"], {"strategy": "ddp", "ranks": 2, "micro_batch": 4}),
        ({"parallel.strategy": "single", "parallel.ranks": 1}, {"strategy": "single", "ranks": 1, "micro_batch": 4}),
        (
            ["parallel.strategy=ddp", "parallel.ranks=2", "parallel.tensor=2"],
            {"strategy": "ddp", "ranks": 2, "tensor": 2, "micro_batch": 4},
        ),
        (["parallel.ranks=16"], {**OLD, "ranks": 16}),
    ],
)
def test_a_new_strategy_is_a_new_layout(tmp_path, overrides, parallel):
    run = RunDir.claim(tmp_path, "x", build_spec({"parallel": OLD}))
    assert build_resumed_spec(run.path, overrides).parallel == build_spec({"parallel": parallel}).parallel


def test_weights_that_are_not_numbers_agree_with_nothing():
    ours = {"a": torch.ones(3), "b": torch.ones(2)}
    assert compare_weights(ours, ours).value == 0
    found = compare_weights(ours, {**ours, "b": torch.full((2,), math.nan)})
    assert (found.value, found.where) == (math.inf, "b")
    assert compare_weights(ours, {"a": ours["a"]}).value == math.inf
