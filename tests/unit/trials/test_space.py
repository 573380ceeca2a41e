"""What is typed after a key: values, ranges, and what is neither."""

import math

import pytest

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.trials.search_space import (
    OneOf,
    Range,
    apply_values,
    enumerate_grid,
    parse_space,
    sample_trials,
    suggest_values,
)
from paceline.trials.sweep import build_sweep_plan

SPACE = {
    "train.lr": Range(1e-4, 1e-2, log=True),
    "model.layers": Range(1, 4),
    "train.optimizer": OneOf(("sgd", "adam")),
}


def test_words_are_values_ranges_and_what_all_trials_share():
    words = ["train.lr=1e-4..1e-2:log", "model.layers=1..4", "train.optimizer=sgd,adam", "train.steps=5"]
    space, fixed = parse_space([*words, "data.x=[a,b],[c]"])
    assert space == {**SPACE, "data.x": OneOf((["a", "b"], ["c"]))}
    assert fixed == {"train.steps": 5}
    assert parse_space(["train.lr=3e-4,1e-3,0.1"])[0] == {"train.lr": OneOf((3e-4, 1e-3, 0.1))}
    assert parse_space({"train.lr": [0.1, 0.2], "model.layers": "1..4"})[0]["model.layers"] == Range(1, 4)


def test_a_grid_has_every_combination_and_a_drawn_trial_does_not_depend_on_their_number():
    grid = enumerate_grid({"a": OneOf((1, 2)), "b": OneOf(("x", "y"))})
    assert grid == [{"a": a, "b": b} for a in (1, 2) for b in "xy"]
    some = sample_trials(SPACE, 200, seed=3)
    assert sample_trials(SPACE, 5, seed=3) == some[:5]
    assert {values["model.layers"] for values in some} == {1, 2, 3, 4}
    assert all(1e-4 <= values["train.lr"] <= 1e-2 for values in some)
    assert 70 < sum(values["train.lr"] < 1e-3 for values in some) < 130, "half of them, on a logarithmic scale"


def test_optuna_suggests_near_what_did_well_and_the_same_again():
    pytest.importorskip("optuna")
    before = [({**values}, -abs(math.log10(values["train.lr"]) + 3)) for values in sample_trials(SPACE, 12, seed=0)]
    first = suggest_values(SPACE, before, seed=1)
    assert suggest_values(SPACE, before, seed=1) == first
    assert SPACE["train.lr"].low <= first["train.lr"] <= SPACE["train.lr"].high
    assert first["train.optimizer"] in ("sgd", "adam")
    assert set(suggest_values(SPACE, [*before, (first, None)], seed=1)) == set(SPACE)


def test_a_length_replaces_the_other_and_paths_are_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = build_spec({"train": {"epochs": 3}})
    assert apply_values(spec, {"train.steps": 7}).train.epochs is None
    assert apply_values(spec, {"data.path": "a.csv"}).data.path == tmp_path / "a.csv"


@pytest.mark.parametrize(
    ("words", "choices", "said"),
    [
        ([], {}, "nothing varies"),
        (["train.lr"], {}, "has no values"),
        (["train.lr=0.1,0.1"], {}, "nothing varies"),
        (["train.lr=1..0"], {}, "must be the smaller one"),
        (["train.lr=0..1:log"], {}, "numbers above 0"),
        (["train.lr=1e-4..x"], {}, "is not a range"),
        (["train.lr=1e-4..1e-2"], {}, "--random"),
        (["train.lr=0.1,0.2", "train.lr=0.3,0.4"], {}, "train.lr is given twice"),
        (["train.lrr=0.1,0.2"], {}, "train.lr"),
        (["train.lr=0.1,0.2"], {"trials": 5}, "--trials"),
        (["train.lr=0.1,0.2"], {"trials": 0, "search": "random"}, "is not a number of trials"),
        (["train.epochs=1,2"], {"halving": True}, "train.epochs cannot vary"),
        (["train.lr=0.1,0.2"], {"halving": True, "search": "optuna"}, "leave one out"),
        (["workload=topics", "model.k=2,3"], {"halving": True}, "cannot be extended"),
        (["model.width=64,128", "model.heads=7,4"], {}, "does not divide"),
    ],
)
def test_what_cannot_be_tried_is_one_line(words, choices, said):
    workload = "topics" if words[:1] == ["workload=topics"] else "classifier"
    with pytest.raises(UserError, match=said) as refused:
        build_sweep_plan(build_spec({"workload": workload}), words, None, choices)
    assert "\n" not in str(refused.value)
    possible = build_sweep_plan(build_spec({}), ["model.width=96,128", "model.heads=6,4"], None, {})
    assert possible.trials == 4, "a combination that contradicts itself is a row"
