"""Boosted trees on several ranks: the same bytes on any number of them, also after a kill."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from dying_trees import MARK

import paceline
from paceline import train
from paceline.config import build_spec
from paceline.errors import RunFailed
from paceline.launch.environment import detect_rank
from paceline.launch.local import run_ranks
from paceline.launch.process_group import join_ranks
from paceline.trials.check import check
from paceline.workloads.trees.xgboost_rounds import XGBoostNetwork

pytestmark = pytest.mark.usefixtures("warm_ranks")
DYING = f"{Path(__file__).with_name('dying_trees.py')}:DyingTrees"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return build_spec(
        {
            "name": "trees",
            "workload": "trees",
            "model": {"max_depth": 4, "subsample": 0.8, "colsample_bytree": 0.7},
            "data": {"rows": 1500, "cache": str(tmp_path_factory.mktemp("tables"))},
            "train": {"steps": 8, "checkpoint_every": 2},
            "parallel": {"threads": 1, "device": "cpu", "timeout_s": 120},
        }
    )


@pytest.fixture(scope="module")
def runs(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return check(spec, (1, 2, 4), steps=8, out=folder), sorted(folder.iterdir())


def test_the_model_is_the_same_bytes_on_any_number_of_ranks(runs):
    parity, folders = runs
    assert all(row.loss < 1e-12 and row.weights == row.evaluation == 0 for row in parity.rows)
    assert len({(folder / "model.json").read_bytes() for folder in folders}) == 1


def test_a_ranking_is_the_same_bytes_with_queries_of_any_length(spec, tmp_path):
    """A query is on one rank. The user's own function is asked once, of all rows."""
    random = np.random.default_rng(1)
    query = np.repeat(np.arange(80), random.integers(2, 40, 80))
    X = random.normal(size=(len(query), 4)).astype(np.float32)
    np.savez(tmp_path / "queries.npz", X=X, y=np.digitize(X[:, 0] - X[:, 1] ** 2, [0, 1]), query=query)
    (tmp_path / "metrics.py").write_text("def last(labels, said):\n    return said[-1] + len(labels)\n")
    given = {"model.metric": f"{tmp_path}/metrics.py:last", "model.subsample": 1.0, "data.memory": "disk"}
    asked = spec.replace({**given, "data.path": str(tmp_path / "queries.npz")})
    parity = check(asked, (1, 3), steps=5, out=tmp_path / "runs")
    assert all(row.loss < 1e-12 and row.weights == row.evaluation == 0 for row in parity.rows)
    assert len({file.read_bytes() for file in tmp_path.glob("runs/*/model.json")}) == 1


def test_a_killed_run_goes_on_with_another_number_of_ranks(spec, runs, tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path / "killed"))
    with pytest.raises(RunFailed, match=r"rank 1 .*SIGKILL"):
        train(spec.replace({"workload": DYING, "parallel.ranks": 2}), tmp_path, show=False)
    again = paceline.resume(tmp_path / "trees", {"parallel.ranks": 1}, show=False)
    assert (again.path / "model.json").read_bytes() == (runs[1][0] / "model.json").read_bytes()
    assert again.summary.trained.steps == 8


def test_a_stopped_rank_is_named(spec, tmp_path, monkeypatch):
    """XGBoost tells of a connection that timed out, which is no bug of anybody's."""
    monkeypatch.setenv(MARK, str(tmp_path / "stopped"))
    stopped = DYING.replace(":Dying", ":Stopped")
    with pytest.raises(RunFailed, match=r"^rank 1 on .*SIGSTOP"):
        train(spec.replace({"workload": stopped, "parallel.ranks": 2, "parallel.timeout_s": 6}), tmp_path, show=False)


def find_tracker_addresses():
    rank_info = detect_rank(os.environ)
    with join_ranks(rank_info, "cpu", 1, 60.0):
        network = XGBoostNetwork(rank_info, 60.0)
        network.join()
        port = network._tracker.worker_args()["dmlc_tracker_port"] if rank_info.rank == 0 else None
        opened = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        network.any(False)
        network.leave()
    return [one.ip for one in opened if one.port == port]


def test_on_one_machine_the_tracker_of_xgboost_is_open_to_the_loopback_alone():
    assert run_ranks(find_tracker_addresses, (), 2) == [["127.0.0.1"], []]
