"""How models are wrapped: what is gathered together, built without memory or rejected; groups of parameters."""

import math

import pytest
import torch
from torch import nn

from paceline.config import Train, build_spec
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.parallel import fsdp, parallelize, pipeline, tensor
from paceline.parallel.parameters import resolve_groups
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


def test_a_single_number_and_layers_that_share_a_weight_are_not_sharded():
    model, two = Chain(), layout(ranks=2, strategy="fsdp")
    fsdp.reject_unshardable(model, list(model.layers), two)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="temperature is a single"):
        fsdp.reject_unshardable(model, list(model.layers), two)
    model.layers[3].weight = model.layers[1].weight
    with pytest.raises(UserError, match="1 and 3 share weight"):
        fsdp.reject_unshardable(model, list(model.layers), two)


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


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))
        self.head = nn.Linear(8, 100)


def find_names(model, least):
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[unit] for unit in fsdp.find_units(model, least)]


def test_modules_of_a_size_and_what_they_leave_over():
    model = Embedded()
    assert find_names(model, 500) == ["layers.0", "layers.1"], "288 + 264 parameters each"
    assert find_names(model, 270) == ["layers.0.0", "layers.1.0"], "what is left of a layer is too small"
    assert find_names(model, 200) == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]
    assert find_names(model, 600) == [], "a list of layers is not called, so it cannot be gathered"
    assert "head" not in find_names(model, 1), "it belongs to the whole, as the embedding"
    assert find_names(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), 50) == ["0"], "it calls all that it holds"


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
    with parallelize.build_without_memory():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert model.first is model.second
    assert model.up.weight is model.down.weight
    assert not model.down.bias.requires_grad
    assert model.scale.tolist() == [0.5, 0.5]
    assert parallelize.has_transient_buffers(model)
    assert not parallelize.has_transient_buffers(nn.BatchNorm1d(2))
    assert parallelize.has_shared_parameters(model)
    assert not parallelize.has_shared_parameters(nn.Linear(2, 2))
    parallelize.allocate_parameters(model, torch.device("cpu"))
    assert not any(p.is_meta for p in model.parameters())
    assert model.scale.tolist() == [0.5, 0.5]
    assert not any(p.is_meta for p in nn.Linear(2, 2).parameters()), "afterwards all is as ever"


class Grouped(Workload):
    def groups(self, model):
        return self.own


def grouped(table, own=None):
    model = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    workload = Grouped(build_spec({}))
    workload.own = own or {}
    return resolve_groups(workload, Train(groups=table), model), model


def test_the_first_pattern_that_matches_decides_and_the_run_file_comes_first():
    table = {"head.bias": {"frozen": True}, "head.*": {"lr": 0.5, "weight_decay": 0}}
    groups, model = grouped(table, {"head.*": {"lr": 9.0}, "body.weight": {"frozen": True}})
    assert groups.pattern("head.bias") == "head.bias"
    assert groups[groups.pattern("head.weight")].lr == 0.5
    assert groups.pattern("body.bias") == ""
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["body.weight", "head.bias"]
    assert list(groups.words()) == [
        "2 parameters 'head.bias': frozen",
        "8 parameters 'head.*': lr 0.5, weight_decay 0",
        "12 parameters 'body.weight': frozen",
        "12 parameters to train = 26 - 14 frozen",
    ]


def test_the_run_file_may_take_all_that_the_workload_groups():
    groups, _ = grouped({"*": {"lr": 1.0}}, {"head.*": {"frozen": True}})
    assert list(groups.table) == ["*"]
    assert not groups.frozen


@pytest.mark.parametrize(
    ("table", "own", "named"),
    [
        ({"haed.*": {"lr": 1}}, {}, r"did you mean 'head\.\*'"),
        ({"zzz": {"lr": 1}}, {}, r"body\.weight, body\.bias"),
        ({"*": {"lr": 1}, "head.*": {"lr": 2}}, {}, r"'head\.\*' .* '\*' before"),
        ({"*": {"frozen": True}}, {}, "all 26 parameters"),
        ({}, {"head.*": {"lrr": 1}}, r"'head\.\*': lrr: "),
        ({}, ["head.*"], "returned list"),
    ],
)
def test_what_is_rejected(table, own, named):
    with pytest.raises(UserError, match=named):
        grouped(table, own)


def test_a_run_file_names_what_is_wrong_with_a_group():
    with pytest.raises(UserError, match=r"groups\.head\.\*\.lr"):
        build_spec({"train": {"groups": {"head.*": {"lr": 0}}}})
    with pytest.raises(UserError, match=r"groups\.head\.\*\.rate"):
        build_spec({"train": {"groups": {"head.*": {"rate": 1}}}})
