"""Models that would lead a library astray are refused before it sees them; those that it wrote are not."""

import json

import lightgbm
import numpy as np
import pytest
import xgboost

from fuzzing_records import KeptLightgbm, KeptTrees
from paceline.errors import UserError
from paceline.workloads.trees.models import check_model, strip_lightgbm_model
from paceline.workloads.trees.tree_model import FittedTrees

OUTPUTS = {"binary": 1, "multiclass": 3, "regression": 1, "poisson": 1, "lambdarank": 1}
OF_XGBOOST = {
    "binary": "binary:logistic",
    "multiclass": "multi:softprob",
    "regression": "reg:squarederror",
    "poisson": "count:poisson",
    "lambdarank": "rank:ndcg",
}


def rows_of(task):
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 4))
    X[:, 3] = random.integers(0, 9, 300)
    y = random.integers(0, 3, 300)
    return X, np.minimum(y, 1) if task == "binary" else y


@pytest.mark.parametrize("task", OUTPUTS)
def test_what_lightgbm_wrote_is_read(task):
    X, y = rows_of(task)
    more = {"num_class": 3} if task == "multiclass" else {}
    given = {"objective": task, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 2, **more}
    groups = [100] * 3 if task == "lambdarank" else None
    for least in (2, 290):  # with 290, no tree has a branch
        rows = lightgbm.Dataset(X, y, categorical_feature=[3], group=groups)
        made = lightgbm.train({**given, "min_data_in_leaf": least}, rows, 3)
        raw = made.model_to_string().encode()
        check_model("lightgbm", raw, 4, OUTPUTS[task])
        again = lightgbm.Booster(model_str=strip_lightgbm_model(raw))
        assert np.array_equal(again.predict(X, raw_score=True), made.predict(X, raw_score=True))
        assert again.dump_model()["tree_info"] == made.dump_model()["tree_info"]


@pytest.mark.parametrize("task", OUTPUTS)
def test_what_xgboost_wrote_is_read(task):
    X, y = rows_of(task)
    more = {"num_class": 3} if task == "multiclass" else {}
    rows = xgboost.DMatrix(X, y, feature_types=[*["float"] * 3, "c"], enable_categorical=True)
    if task == "lambdarank":
        rows.set_group([100] * 3)
    for gamma in (0, 0.5, 1e6):  # with the last, no tree has a branch
        made = xgboost.train({"objective": OF_XGBOOST[task], "nthread": 1, "gamma": gamma, **more}, rows, 4)
        for some in (made, made[:2]):
            check_model("xgboost", bytes(some.save_raw("json")), 4, OUTPUTS[task])


CHANGES = {
    "its own parent": ("left_children", 0, 0),
    "a node beyond the last": ("right_children", 0, 3),
    "half of a branch": ("right_children", 0, -1),
    "a column beyond the last": ("split_indices", 0, 2),
    "a category beyond all": ("categories", 0, 1 << 31),
    "categories of another node": ("categories_nodes", 0, 1),
    "categories that are not there": ("categories_sizes", 0, 9),
}


@pytest.mark.parametrize("name", CHANGES)
def test_trees_of_xgboost_that_lead_nowhere(name, tmp_path):
    key, at, value = CHANGES[name]
    KeptTrees.make(tmp_path)
    file = tmp_path / "kept" / "model.json"
    model = json.loads(file.read_text())
    model["learner"]["gradient_booster"]["model"]["trees"][1][key][at] = value
    file.write_text(json.dumps(model))
    with pytest.raises(UserError, match=r"model.json is damaged \(tree 1"):
        FittedTrees.read(tmp_path / "kept")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("left_child=1 -1 -3", "left_child=0 -1 -3"),
        ("right_child=-2 2 -4", "right_child=-2 9 -4"),
        ("right_child=-2 2 -4", "right_child=-2 2 -3"),
        ("split_feature=0 0 0", "split_feature=0 7 0"),
        ("decision_type=2 2 2", "decision_type=1 2 2"),
        ("num_leaves=4", "num_leaves=3"),
        ("threshold=1.", "threshold=1_"),
    ],
)
def test_trees_of_lightgbm_that_lead_nowhere(before, after, tmp_path):
    KeptLightgbm.make(tmp_path)
    file = tmp_path / "kept" / "model.txt"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    with pytest.raises(UserError, match=r"model\.txt is damaged"):
        FittedTrees.read(tmp_path / "kept")
