"""Boosted trees on one rank: against the libraries, on every kind of table, and used."""

import json
import os

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import xgboost

import paceline
from paceline import train
from paceline.config import build_spec
from paceline.data.prepared_table import prepare_table
from paceline.errors import UserError
from paceline.inference.export import export
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.workloads.trees.plots import draw_tree_plots
from paceline.workloads.trees.tree_model import FittedTrees

ROWS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same table as csv, as Parquet and, without its names, as .npz."""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    X = random.normal(size=(ROWS, 4)).astype(np.float32)
    X[random.random(ROWS) < 0.1, 1] = np.nan
    town = np.array(["Oslo", "Rome", "York"])[random.integers(3, size=ROWS)]
    late = (X[:, 0] + (town == "Rome") + random.normal(size=ROWS) / 2 > 0.5) * 1
    weight = random.random(ROWS).round(3)
    columns = {**{f"x{j}": X[:, j] for j in range(4)}, "town": town, "weight": weight}
    columns |= {"late": np.array(["no", "yes"])[late], "amount": 3 * X[:, 0] + X[:, 2] + 10}
    columns |= {"size": np.digitize(X[:, 2], [-0.5, 0.5])}
    columns["x1"] = pa.array(np.where(np.isnan(X[:, 1]), None, X[:, 1].astype(object)).tolist(), pa.float32())
    table = pa.table(columns)
    pyarrow.csv.write_csv(table, folder / "table.csv")
    pyarrow.parquet.write_table(table, folder / "table.parquet")
    np.savez(folder / "table.npz", X=X, y=late, weight=weight.astype(np.float32))
    return folder


def test_types_need_no_configuration(tmp_path):
    """Booleans, dates, numbers among words, and gaps: the same trees from csv and Parquet."""
    random, rows = np.random.default_rng(0), 300
    days = pd.Timestamp("2024-02-28") + pd.to_timedelta(random.integers(0, 90, rows), unit="D")
    frame = pd.DataFrame(
        {"day": days, "moment": days.tz_localize("UTC") + pd.Timedelta("90s"), "n": random.normal(size=rows)}
    )
    frame["flag"] = random.random(rows) < 0.5
    frame["gaps"] = np.where(random.random(rows) < 0.2, None, frame.flag)
    frame["mixed"] = np.where(np.arange(rows) < 200, random.integers(0, 4, rows).astype(str), "unknown")
    frame["rich"] = (frame.n + frame.flag + (days > "2024-04-10") + (frame.mixed == "3")) > 1.2
    models = []
    for kind in ("csv", "parquet"):
        getattr(frame, f"to_{kind}")(tmp_path / f"t.{kind}", index=False)
        data = {"path": str(tmp_path / f"t.{kind}"), "label": "rich", "cache": str(tmp_path)}
        run = train({"name": kind, "workload": "trees", "data": data, "train": {"steps": 3}}, tmp_path, show=False)
        models.append((run.path / "model.json").read_bytes())
    assert models[0] == models[1]
    model = paceline.open(run.path)
    assert model.classes == ("False", "True")
    assert model.fitted.coding.categories == {"mixed": ["0", "1", "2", "3", "unknown"]}
    as_text = model.predict([{name: str(value) for name, value in row.items()} for row in frame.to_dict("records")])
    assert np.array_equal(as_text.probabilities, model.predict(frame.to_dict("records")).probabilities)
    assert (np.array(as_text.labels) == frame.rich.astype(str)).mean() > 0.85


@pytest.fixture
def spec(folder):
    def make(label="late", file="table.parquet", **given):
        others = [name for name in ("late", "amount", "size", "weight") if name != label]
        data = {"path": str(folder / file), "label": label, "categories": ["town"], "ignore": others}
        values = {
            "name": "trees",
            "workload": "trees",
            "model": {"max_depth": 3, "learning_rate": 0.3},
            "data": {**data, "cache": str(folder / "cache")},
            "train": {"steps": 6},
            "parallel": {"threads": 1, "device": "cpu"},
        }
        return build_spec(values).replace(given)

    return make


def data_of(spec):
    split = prepare_table(spec.data, lambda text: None).split("train")
    return split.X, split.y


def model_of(run):
    return (run.path / "model.json").read_bytes()


def trees_of(raw):
    return json.loads(raw)["learner"]["gradient_booster"]


def test_the_trees_are_those_of_the_library(spec, tmp_path):
    """Bins, first guess and trees, to the last bit: nothing is added to what a library does in one process."""
    asked = spec()
    assert os.environ["OMP_WAIT_POLICY"], "the run file was read, and torch reads this when it is loaded"
    run = train(asked, tmp_path, show=False)
    X, y = data_of(asked)
    kinds, names = ["q"] * 4 + ["c"], ["x0", "x1", "x2", "x3", "town"]
    matrix = xgboost.QuantileDMatrix(X, y, feature_types=kinds, feature_names=names, enable_categorical=True)
    common = {"max_depth": 3, "learning_rate": 0.3}
    own = xgboost.train({**common, "objective": "binary:logistic", "nthread": 1}, matrix, 6)
    ours = xgboost.Booster(model_file=run.path / "model.json")
    assert trees_of(ours.save_raw("json")) == trees_of(own.save_raw("json"))
    run = train(spec(**{"model.library": "lightgbm"}), tmp_path, show=False)
    rows = lightgbm.Dataset(X, y, categorical_feature=[4], params={"verbose": -1})
    fixed = {"deterministic": True, "num_threads": 1, "force_row_wise": True, "verbose": -1}
    own = lightgbm.train({**common, **fixed, "objective": "binary"}, rows, 6)
    ours = lightgbm.Booster(model_file=run.path / "model.txt")
    assert np.array_equal(ours.predict(X), own.predict(X))


def test_every_kind_of_file_gives_the_same_table(spec, folder):
    tables = [prepare_table(spec(file=name).data, lambda text: None) for name in ("table.csv", "table.parquet")]
    one, other = (table.split("train") for table in tables)
    assert np.array_equal(one.X, other.X, equal_nan=True)
    assert tables[0].facts.categories == {"town": ["Oslo", "Rome", "York"]}
    assert tables[0].facts.classes == ("no", "yes")
    assert len(one) + tables[0].facts.test_rows == ROWS
    data = {"path": str(folder / "table.npz"), "cache": str(folder / "cache")}
    third = prepare_table(build_spec({"workload": "trees", "data": data}).data, print).split("train")
    assert np.array_equal(third.X, one.X[:, :4], equal_nan=True)
    assert third.weights is not None


@pytest.mark.parametrize(
    ("label", "objective", "metrics"),
    [
        ("late", "auto", {"loss", "accuracy", "macro_f1", "auc", "majority"}),
        ("size", "multi:softprob", {"loss", "accuracy", "macro_f1", "auc", "majority"}),
        ("amount", "auto", {"loss", "rmse", "mae", "r2"}),
        ("size", "count:poisson", {"loss", "rmse", "mae", "r2"}),
    ],
)
def test_each_objective_learns(spec, tmp_path, label, objective, metrics):
    run = train(spec(label, **{"model.objective": objective}), tmp_path, show=False)
    assert run.metrics.keys() == metrics
    assert (export(run.path, tmp_path / "model", onnx=True) / "model.onnx").exists()
    draw_tree_plots(run.path)
    drawn = [file.stem for file in sorted((run.path / "pictures").iterdir())]
    assert drawn == ["importance-000006", "shap_values-000006"]
    steps = [event["loss"] for event in read_events(RunDir(run.path).events_file(0), "step") if "loss" in event]
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_run_that_goes_on_for_longer_is_the_longer_run(spec, tmp_path, library):
    """Rows and columns of a round are drawn, and are the same ones after a restart."""
    given = {"model.library": library, "model.subsample": 0.5, "model.colsample_bytree": 0.6}
    whole = train(spec(**given), tmp_path / "whole", show=False)
    part = train(spec(**given, **{"train.steps": 4, "train.checkpoint_format": "full"}), tmp_path / "part", show=False)
    longer = paceline.resume(part.path, {"train.steps": "+2"}, show=False)
    file = {"xgboost": "model.json", "lightgbm": "model.txt"}[library]
    assert (longer.path / file).read_bytes() == (whole.path / file).read_bytes()
    assert longer.summary.trained.steps == 6


def test_a_table_on_disk_gives_the_same_trees(spec, tmp_path):
    few = {"data.bin_rows": 300, "model.subsample": 0.5}
    ram, disk = (train(spec(**few, **{"data.memory": m}), tmp_path / m, show=False) for m in ("ram", "disk"))
    assert model_of(ram) == model_of(disk)
    assert ram.metrics == disk.metrics


def test_weights_and_early_stopping(spec, tmp_path):
    """A learning rate of 1 overfits at once; no tree after the best round is used."""
    given = {"data.weight": "weight", "data.ignore": ["amount", "size"], "model.learning_rate": 1.0}
    asked = spec(**given, **{"train.steps": 60, "train.evaluate_every": 1, "train.patience": 3, "train.log_every": 5})
    run = train(asked, tmp_path, show=False)
    best = run.summary.evaluation.best["step"]
    assert run.summary.trained.steps == best + 3
    assert "3 evaluations without a lower loss" in run.summary.why
    assert xgboost.Booster(model_file=run.path / "model.json").num_boosted_rounds() == best


@pytest.fixture(scope="module")
def queries(folder):
    """Rows of queries of different length, with how relevant each is."""
    random = np.random.default_rng(1)
    query = np.repeat(np.arange(60), random.integers(2, 20, 60))
    X = random.normal(size=(len(query), 3)).astype(np.float32)
    y = np.digitize(X[:, 0] + random.normal(size=len(query)) / 2, [0, 1])
    np.savez(folder / "queries.npz", X=X, y=y, query=query)
    (folder / "metrics.py").write_text("def above(labels, said):\n    return float((said > 0).sum() + labels[0] / 8)\n")
    data = {"path": str(folder / "queries.npz"), "cache": str(folder / "cache")}
    model = {"max_depth": 3, "metric": f"{folder / 'metrics.py'}:above"}
    values = {"workload": "trees", "name": "ranked", "model": model, "data": data, "train": {"steps": 6}}
    return build_spec({**values, "parallel": {"threads": 1, "device": "cpu"}})


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_rows_are_ranked_within_queries(queries, tmp_path, library):
    """NDCG is that of XGBoost, and a function of the user's own sees all held-out rows."""
    run = train(queries.replace({"model.library": library}), tmp_path, show=False)
    table = prepare_table(queries.data, lambda text: None)
    rows, test = table.split("train"), table.split("test")
    assert len(rows.queries) + len(test.queries) == 60
    assert table.facts.queries == len(rows.queries) > 40
    said = FittedTrees.read(run.path).margins(test.X)[:, 0]
    numbers = np.searchsorted(test.queries, np.arange(len(test)), side="right")
    asked = xgboost.DMatrix(test.X, test.y, qid=numbers, base_margin=said)
    plain = {"objective": "rank:ndcg", "eval_metric": ["ndcg", "ndcg@10"], "base_score": 0}
    told = xgboost.Booster(plain, cache=[asked]).eval(asked).replace("\t", ":").split(":")
    assert run.metrics["ndcg"] == pytest.approx(float(told[2]), abs=1e-6)
    assert run.metrics["ndcg_at_10"] == pytest.approx(float(told[4]), abs=1e-6)
    assert run.metrics["above"] == (said > 0).sum() + test.y[0] / 8
    steps = [event["loss"] for event in read_events(RunDir(run.path).events_file(0), "step") if "loss" in event]
    assert steps[-1] < steps[0] < 0.3


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_finished_trees_are_used_on_new_rows(spec, folder, tmp_path, library):
    asked = spec(**{"model.library": library})
    run = train(asked, tmp_path, show=False)
    rows = pyarrow.parquet.read_table(folder / "table.parquet").to_pylist()
    found = paceline.open(run.path).predict(rows)
    right = np.mean([label == row["late"] for label, row in zip(found.labels, rows, strict=True)])
    assert right > 0.8
    written = export(run.path, tmp_path / "model", onnx=True)
    names = json.loads((written / "names.json").read_text())
    assert names["categories"]["town"] == ["Oslo", "Rome", "York"]
    X, _ = data_of(asked)
    if library == "xgboost":
        matrix = xgboost.DMatrix(X, feature_names=names["columns"], feature_types=["q"] * 4 + ["c"])
        alone = xgboost.Booster(model_file=written / "model.json").predict(matrix)
    else:
        alone = lightgbm.Booster(model_file=written / "model.txt").predict(X)
    assert FittedTrees.read(run.path).predict_encoded(X)[:, 1] == pytest.approx(alone, abs=1e-6)
    assert (written / "model.onnx").exists()  # its numbers were compared
    assert len(paceline.open(run.path).predict([{**rows[0], "town": "Paris"}])) == 1


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_damaged_trees_are_not_given_to_the_library(spec, tmp_path, library):
    """It would predict something else, or end the process."""
    run = train(spec(**{"model.library": library, "train.steps": 2}), tmp_path, show=False).path
    for name in ("model.json" if library == "xgboost" else "model.txt", "table.json"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content.replace(b"0", b"1", 1))
        with pytest.raises(UserError, match=f"{name} is damaged"):
            paceline.open(run)
        (run / name).write_bytes(content)
    (run / name).write_bytes(content[:-1])
    train(spec(**{"model.library": library, "train.steps": 2}), tmp_path, show=False, resume_or_start=True)
    assert paceline.open(run).classes


def test_without_the_table_there_are_no_shap_values(spec, folder, tmp_path):
    run = train(spec(), tmp_path, show=False)
    recorded = run.path / "spec.yaml"
    recorded.write_text(recorded.read_text().replace(str(folder / "cache"), str(tmp_path / "nowhere")))
    draw_tree_plots(run.path)
    assert [file.stem for file in (run.path / "pictures").iterdir()] == ["importance-000006"]
