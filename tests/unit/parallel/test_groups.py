"""Groups of parameters: which pattern decides, what is refused, what is said."""

import pytest
from torch import nn

from paceline.config import Train, build_spec
from paceline.errors import UserError
from paceline.parallel.parameters import resolve_groups
from paceline.workload import Workload


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
