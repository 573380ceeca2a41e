"""Tables and parameters that make no sense: one line each, before anything is written."""

import re

import numpy as np
import pytest

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError

QUERIES = "q,a,b,y\n" + "".join(f"{i // 5},{i % 7},{i % 4},{i % 3}\n" for i in range(60))
CLEAN = "a,b,town,y\n" + "".join(f"{i % 7},{i % 3},{'AB'[i % 2]},{'no' if i % 5 else 'yes'}\n" for i in range(60))
NUMBERS = CLEAN.replace("no", "0.5").replace("yes", "1.5")


def refused(tmp_path, text, given=(), name="table.csv"):
    file = tmp_path / name
    file.write_text(text)
    values = {"path": str(file), "label": "y", "categories": ["town"], "cache": str(tmp_path / "cache")}
    spec = build_spec({"workload": "trees", "data": values, "train": {"steps": 2}}).replace(dict(given))
    with pytest.raises(UserError) as caught:
        train(spec, tmp_path / "runs", show=False)
    assert not list(tmp_path.glob("runs/*"))
    told = str(caught.value)
    assert "\n" not in told
    return told


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        (CLEAN, {"data.label": "Y"}, "data.label=Y: .* has no such column.*there: a, b, town, y"),
        (CLEAN.replace("yes", "no"), {}, "data.label=y: every row has no; there is nothing to learn"),
        (CLEAN, {"data.categories": []}, r"town holds words, .*type  data.categories=\[town\]"),
        (CLEAN, {"data.categories": ["town", "city"]}, "data.categories=city: .* has no such column"),
        (CLEAN, {"data.categories": ["town", "y"]}, "column 'y' is the label, and can be nothing else"),
        (CLEAN, {"data.weight": "w"}, "data.weight=w: .* has no such column"),
        (CLEAN, {"data.query": "a"}, r"row 8: rows of a=0 were there before, .*; sort the table by 'a'"),
        (CLEAN, {"data.query": "town", "data.categories": []}, r"row 3: rows of town=A were there before"),
        (CLEAN, {"model.objective": "rank:ndcg"}, "name their column as  data.query=COLUMN"),
        (
            CLEAN,
            {"train.lr": 0.1},
            "is for models that learn by gradients, .*type  model.learning_rate=0.1",
        ),
        (CLEAN, {"data.ignore": ["y"]}, "column 'y' is the label, and can be nothing else"),
        (CLEAN, {"data.weight": "town", "data.categories": []}, "column 'town' must hold numbers of 0 or more"),
        (CLEAN, {"model.metric": "statistics:mean"}, r"is called with \(labels, predictions\)"),
        (CLEAN, {"data.query": "y"}, "column 'y' is the label, and can be nothing else"),
        (CLEAN, {"model.metric": "nowhere.py:cost"}, "model.metric: there is no file 'nowhere.py'"),
        (CLEAN, {"model.metric": "math:cos", "data.test_fraction": 0}, "model.metric=math:cos needs held-out rows"),
        (CLEAN, {"model.metric": "math:cost"}, "model.metric: 'math' has no function 'cost'"),
        (CLEAN, {"data.weight": "b", "data.ignore": ["a", "town"], "data.categories": []}, "no column to learn from"),
        (CLEAN.replace("1,1,B", "-inf,1,B"), {}, "row 2: 'a' is infinite"),
        (CLEAN.replace("1,1,B,no", "1,1,B,"), {}, "row 2: the label 'y' is missing"),
        (CLEAN.replace("1,1,B,no", "1,1"), {}, "Expected 4 columns, got 2"),
        (CLEAN.replace("a,b,", "a,a,", 1), {}, "two columns are called 'a'"),
        (CLEAN, {"model.objective": "reg:squarederror"}, r"'y' holds words \(no, yes\); use  model.objective=auto"),
        (NUMBERS, {"model.objective": "multiclass"}, r"'y' holds numbers \(0.5, 1.5\)"),
        (
            CLEAN.replace("yes", "maybe", 3),
            {"model.objective": "binary"},
            "'y' has 3 classes; use  model.objective=mult",
        ),
        (CLEAN.replace("no", "1").replace("yes", "2", 3).replace("yes", "3"), {}, "holds 3 whole numbers.*or amounts"),
        (NUMBERS.replace("1.5", "-2"), {"model.objective": "count:poisson"}, "is -2 somewhere; counts are 0 or more"),
        (CLEAN, {"parallel.ranks": 64}, "parallel.ranks=64: there are 4. rows; use fewer ranks"),
        (CLEAN, {"train.steps": None}, "how many rounds. .* train.steps=200"),
        (CLEAN, {"train.patience": 2, "data.test_fraction": 0}, "train.patience=2 needs held-out rows"),
        (CLEAN, {"model.library": "lightgbm", "parallel.ranks": 2}, "LightGBM grows other trees than on one"),
        (CLEAN, {"model.library": "lightgbm", "data.memory": "disk"}, "data.memory=disk is for model.library=xgboost"),
        (CLEAN, {"parallel.strategy": "fsdp", "parallel.ranks": 2}, "spreads rows over ranks and nothing else"),
        (CLEAN.splitlines()[0] + "\n", {}, "rows to learn from; at least 2 are needed"),
        ("", {}, "the file is empty"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path, text, given, said):
    assert re.search(said, told := refused(tmp_path, text, given)), told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eta": 0.1}, "model.eta: here it is called model.learning_rate; type  model.learning_rate=0.1"),
        ({"n_estimators": 50}, "here it is called train.steps"),
        ({"colsample_bynode": 0.5}, "it cannot be chosen"),
        ({"max_deph": 3}, "max_depth"),
        ({"subsample": 0}, "subsample"),
        ({"min_child_samples": 3}, "model.min_child_samples is a parameter of lightgbm"),
        ({"objective": "rank:map"}, "objective"),
    ],
)
def test_parameters_are_checked_before_the_table_is_read(given, said):
    with pytest.raises(UserError, match=said):
        build_spec({"workload": "trees", "model": given})


def test_a_class_that_is_tested_and_never_learned(tmp_path):
    test = tmp_path / "test.csv"
    test.write_text(CLEAN.replace("yes", "maybe"))
    assert "'y' is 'maybe' there, which no row to learn from has" in refused(
        tmp_path, CLEAN, {"data.test_path": str(test)}
    )
    test.write_text(CLEAN.replace("b,", "c,", 1))
    assert "has no column b, which data.path has" in refused(tmp_path, CLEAN, {"data.test_path": str(test)})


def test_arrays_that_do_not_fit(tmp_path):
    for arrays, said in (
        ({"X": np.zeros((4, 2))}, "there is no array 'y'"),
        ({"X": np.zeros((4, 2)), "y": np.zeros(3)}, "y has shape [3], and X has 4 rows"),
        ({"X": np.zeros(4), "y": np.zeros(4)}, "X is float64 of shape [4]"),
    ):
        np.savez(tmp_path / "table.npz", **arrays)
        spec = build_spec({"workload": "trees", "data": {"path": str(tmp_path / "table.npz"), "cache": str(tmp_path)}})
        with pytest.raises(UserError) as caught:
            train(spec.replace({"train.steps": 2}), tmp_path / "runs", show=False)
        assert said in str(caught.value)


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
    from importlib import util

    there = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "xgboost" else there(name, *rest))
    assert "type  pip install 'paceline[trees]'" in refused(tmp_path, CLEAN)


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        (QUERIES, {"model.subsample": 0.5}, "model.subsample and data.query: .* or use  model.library=lightgbm"),
        (QUERIES, {"data.weight": "a"}, "data.weight and data.query"),
        (QUERIES, {"parallel.ranks": 11}, "parallel.ranks=11: there are 1?[0-9] queries to learn from"),
        (QUERIES, {"model.objective": "multiclass"}, "use  model.objective=rank:ndcg  or leave data.query out"),
        (QUERIES.replace(",2\n", ",-2\n"), {}, "numbers such as -2, 0, 1; how relevant .* a whole number from 0 to 31"),
        (QUERIES.replace(",2\n", ",high\n"), {}, "'y' holds words .*; how relevant a row is must be"),
        (QUERIES.replace("0,3,", ",3,", 1), {}, "row 4: the query 'q' is missing"),
    ],
)
def test_rankings_that_make_no_sense(tmp_path, text, given, said):
    told = refused(tmp_path, text, {"data.query": "q", "data.categories": [], **given})
    assert re.search(said, told), told
