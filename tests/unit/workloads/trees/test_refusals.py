"""Tables and parameters that make no sense: one line each."""

import numpy as np
import pytest

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from results import expect_error

QUERIES = "q,a,b,y\n" + "".join(f"{i // 5},{i % 7},{i % 4},{i % 3}\n" for i in range(60))
CLEAN = "a,b,town,y\n" + "".join(f"{i % 7},{i % 3},{'AB'[i % 2]},{'no' if i % 5 else 'yes'}\n" for i in range(60))
WORDY = CLEAN + "".join(f"1,2,w{i},no\n" for i in range(300))
NUMBERS = CLEAN.replace("no", "0.5").replace("yes", "1.5")
NO_WORDS = {"data.categories": []}


def reject(tmp_path, text, given=(), name="table.csv"):
    """The error of a run on this table; nothing was written."""
    file = tmp_path / name
    file.write_text(text)
    values = {"path": str(file), "label": "y", "categories": ["town"], "cache": str(tmp_path / "cache")}
    spec = build_spec({"workload": "trees", "data": values, "train": {"steps": 2}}).replace(dict(given))
    with pytest.raises(UserError) as caught:
        train(spec, tmp_path / "runs", show=False)
    assert not list(tmp_path.glob("runs/*"))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "given", "key", "shown"),
    [
        (CLEAN, {"data.label": "Y"}, "data.label", "a, b, town, y"),
        (CLEAN.replace("yes", "no"), {}, "data.label", "data.label=y"),
        (WORDY, NO_WORDS, "data.ignore", "data.categories=[town]"),
        (CLEAN, {"data.categories": ["town", "city"]}, "data.categories", "city"),
        (CLEAN, {"data.weight": "town", **NO_WORDS}, "data.weight", "'town'"),
        (CLEAN, {"data.weight": "b", "data.ignore": ["a", "town"], **NO_WORDS}, "data.ignore", "'y'"),
        (CLEAN, {"data.query": "a"}, "data.query", "row 8"),
        (CLEAN, {"data.query": "y"}, "data.label", "'y'"),
        (CLEAN, {"model.objective": "rank:ndcg"}, "model.objective", "data.query=COLUMN"),
        (CLEAN, {"train.lr": 0.1}, "train.lr", "model.learning_rate=0.1"),
        (CLEAN, {"model.metric": "math:cos", "data.test_fraction": 0}, "model.metric", "test_fraction"),
        (CLEAN.replace("1,1,B", "-inf,1,B"), {}, "a", "row 2"),
        (CLEAN.replace("1,1,B,no", "1,1,B,"), {}, "data.label", "row 2"),
        (CLEAN.replace("1,1,B,no", "1,1"), {}, "data.path", "Expected 4 columns, got 2"),
        (NUMBERS, {"model.objective": "multiclass"}, "model.objective", "0.5, 1.5"),
        (CLEAN.replace("yes", "so", 3), {"model.objective": "binary"}, "model.objective", "multiclass"),
        (CLEAN.replace("no", "1").replace("yes", "2", 3).replace("yes", "3"), {}, "model.objective", "regression"),
        (NUMBERS.replace("1.5", "-2"), {"model.objective": "count:poisson"}, "model.objective", "-2"),
        (CLEAN, {"parallel.ranks": 64}, "parallel.ranks", "fewer ranks"),
        (CLEAN, {"train.steps": None}, "train.steps", "train.steps=200"),
        (CLEAN, {"model.library": "lightgbm", "parallel.ranks": 2}, "parallel.ranks", "model.library=xgboost"),
        (CLEAN, {"model.library": "lightgbm", "data.memory": "disk"}, "data.memory", "xgboost"),
        (CLEAN, {"parallel.strategy": "fsdp", "parallel.ranks": 2}, "parallel", "parallel.ranks"),
        ("", {}, "data.path", "empty"),
        (QUERIES, {"data.query": "q", "model.subsample": 0.5, **NO_WORDS}, "model.subsample", "lightgbm"),
        (QUERIES, {"data.query": "q", "data.weight": "a", **NO_WORDS}, "data.weight", "lightgbm"),
        (QUERIES, {"data.query": "q", "parallel.ranks": 11, **NO_WORDS}, "parallel.ranks", "queries"),
        (QUERIES, {"data.query": "q", "model.objective": "multiclass", **NO_WORDS}, "model.objective", "rank:ndcg"),
        (QUERIES.replace(",2\n", ",-2\n"), {"data.query": "q", **NO_WORDS}, "model.objective", "-2, 0, 1"),
        (QUERIES.replace("0,3,", ",3,", 1), {"data.query": "q", **NO_WORDS}, "data.query", "row 4"),
    ],
)
def test_the_error_names_the_key_and_the_place(tmp_path, text, given, key, shown):
    error = reject(tmp_path, text, given)
    assert error.key == key
    assert shown in str(error)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"eta": 0.1}, "model.learning_rate=0.1"),
        ({"n_estimators": 50}, "train.steps"),
        ({"colsample_bynode": 0.5}, "model.colsample_bynode"),
        ({"max_deph": 3}, "max_depth"),
        ({"subsample": 0}, "subsample"),
        ({"min_child_samples": 3}, "model.min_child_samples"),
        ({"objective": "rank:map"}, "objective"),
    ],
)
def test_parameters_are_checked_before_the_table_is_read(given, shown):
    with pytest.raises(UserError, match=shown):
        build_spec({"workload": "trees", "model": given})


def test_a_test_table_with_a_new_class_or_without_a_column(tmp_path):
    test = tmp_path / "test.csv"
    replaced = {"yes": "maybe", "b,": "c,", "6,2,": "6,two,"}
    for (old, new), key in zip(replaced.items(), ("data.label", "data.test_path", "b"), strict=True):
        text = CLEAN.replace(old, new, 1)
        test.write_text(text)
        assert reject(tmp_path, CLEAN, {"data.test_path": str(test)}).key == key


@pytest.mark.parametrize(
    ("arrays", "shown"),
    [
        ({"X": np.zeros((4, 2))}, "array y"),
        ({"X": np.zeros((4, 2)), "y": np.zeros(3)}, "y has shape [3]"),
        ({"X": np.zeros(4), "y": np.zeros(4)}, "float64 of shape [4]"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, shown):
    np.savez(tmp_path / "table.npz", **arrays)
    data = {"path": str(tmp_path / "table.npz"), "cache": str(tmp_path)}
    with expect_error("invalid-data") as caught:
        train(build_spec({"workload": "trees", "data": data, "train": {"steps": 2}}), tmp_path / "runs", show=False)
    assert shown in str(caught.value)


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "xgboost" else find(name, *rest))
    assert reject(tmp_path, CLEAN).code == "not-installed"
