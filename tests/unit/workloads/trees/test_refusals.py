"""Tables and parameters that make no sense: one line each."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from results import expect_error

CLEAN = "a,b,town,y\n" + "".join(f"{i % 7},{i % 3},{'AB'[i % 2]},{'no' if i % 5 else 'yes'}\n" for i in range(60))
TABLES = {
    "clean": CLEAN,
    "empty": "",
    "numbers": CLEAN.replace("no", "0.5").replace("yes", "1.5"),
    "queries": "q,a,b,y\n" + "".join(f"{i // 5},{i % 7},{i % 4},{i % 3}\n" for i in range(60)),
    "wordy": CLEAN + "".join(f"1,2,w{i},no\n" for i in range(300)),
}


def reject(tmp_path, text, given=()):
    """The error of a run on this table; nothing was written."""
    file = tmp_path / "table.csv"
    file.write_text(text)
    values = {"path": str(file), "label": "y", "categories": ["town"], "cache": str(tmp_path / "cache")}
    spec = build_spec({"workload": "trees", "data": values, "train": {"steps": 2}}).replace(dict(given))
    with pytest.raises(UserError) as caught:
        train(spec, tmp_path / "runs", show=False)
    assert not list(tmp_path.glob("runs/*"))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("row", yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text("utf-8")), ids=str)
def test_the_error_names_the_key_and_the_place(tmp_path, row):
    name = row.get("table", "clean")
    text, given = TABLES[name], row.get("given", {})
    for change in row.get("replace", ()):
        text = text.replace(*change)
    if name == "queries":
        given = {"data.query": "q", "data.categories": [], **given}
    error = reject(tmp_path, text, given)
    assert error.key == row["key"]
    assert row["shown"] in str(error)


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
