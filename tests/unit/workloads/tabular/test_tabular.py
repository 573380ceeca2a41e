"""The network for tables: on any layout, without its table, and beside trees."""

import json

import numpy as np
import pandas as pd
import pytest

import paceline
from paceline import train
from paceline.config import build_spec
from paceline.reports.report import report
from paceline.trials.check import check
from results import expect_error

SMALL = {"width": 32, "embedding": 4, "bins": 16}


def make_frame(rows=800, seed=0):
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"size": random.normal(size=rows), "town": np.array(["Oslo", "Rome", "York"])[random.integers(3, size=rows)]}
    )
    frame["open"] = random.random(rows) < 0.5
    frame["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 30, rows), unit="D")
    frame["amount"] = 100 + 10 * frame["size"] + 20 * (frame.town == "Rome") + 5 * frame.open
    frame["rich"] = frame.amount + random.normal(size=rows) * 4 > 110
    frame.loc[random.random(rows) < 0.1, "size"] = np.nan
    frame["weight"] = random.random(rows)
    return frame


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    make_frame().to_csv(folder / "t.csv", index=False)
    data = {"path": str(folder / "t.csv"), "label": "rich", "ignore": ["amount", "weight"], "cache": str(folder)}
    steps = {"epochs": 6, "global_batch": 64, "lr": 1e-2}
    run = {"name": "net", "workload": "tabular", "model": SMALL}
    return {**run, "data": data, "train": steps, "parallel": {"threads": 1}}


def test_it_learns_and_predicts_new_rows_without_the_table(values, tmp_path):
    run = train(values, tmp_path, show=False)
    assert run.metrics["accuracy"] > 0.85 > run.metrics["majority"]
    model = paceline.open(run.path)
    assert model.classes == ("False", "True")
    rows = make_frame(200, 1)
    found = model.predict(rows.to_dict("records"))
    assert (np.array(found.labels) == rows.rich.astype(str)).mean() > 0.85
    new = {"size": "?", "town": "Paris", "open": "true", "day": "2024-01-05"}
    assert len(model.predict([new, {**new, "size": 1e9}]).labels) == 2
    with expect_error("invalid-value", "size"):
        model.predict([{**new, "size": "tall"}])


def test_numbers_and_weights(values, tmp_path):
    data = {"label": "amount", "ignore": ["rich"], "weight": "weight"}
    run = train(values | {"data": values["data"] | data}, tmp_path, show=False)
    assert run.metrics["rmse"] == pytest.approx(run.metrics["loss"] ** 0.5)
    assert run.metrics["mae"] < run.metrics["rmse"] < 8  # of a spread of 14
    assert paceline.open(run.path).predict(make_frame(9).to_dict("records"))["predicted"].shape == (9,)


def test_any_layout_gives_the_same_answer(values):
    assert check(build_spec(values), [1, 2], [1, 2], steps=6).holds


def test_an_ensemble_with_trees_takes_their_label_and_its_page_begins_with_the_answer(values, tmp_path):
    trees = {"workload": "trees", "model": {"max_depth": 3}, "train": {"steps": 20}}
    files = []
    for name, member in (("net", values), ("trees", trees)):
        data = {**values["data"], **member.get("data", {})}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(json.dumps(member | {"data": data}))
    spec = {"name": "both", "workload": "ensemble", "model": {"members": [str(file) for file in files]}}
    spec["data"] = {"path": values["data"]["path"], "folds": 2}
    run = train(spec, tmp_path, show=False)
    assert run.metrics["auc"] > 0.85
    page = report([run.path], tmp_path / "report")
    gains = json.loads((run.path / "ensemble.json").read_text())["held_out"]["gains"]
    assert f"{abs(min(gain['auc']['value'] for gain in gains.values())):.4f}" in page.contents.verdict[0]
    assert "importance" in page.page.read_text()  # of the trees
    files[1].write_text(json.dumps(trees | {"data": values["data"] | {"label": "amount"}}))
    with expect_error("conflict", "data.label"):
        train(spec | {"name": "two"}, tmp_path, show=False)
