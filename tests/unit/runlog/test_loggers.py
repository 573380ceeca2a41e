"""Loggers get the numbers, go on after a resume, and never end a run."""

import importlib.util

import pytest

from paceline.config import build_spec
from paceline.io.files import read_json
from paceline.runlog import loggers as module
from paceline.runlog.loggers import check_loggers, open_loggers
from paceline.runlog.run_dir import RunDir
from results import expect_error

SPEC = build_spec({"name": "mine", "train": {"lr": 0.25}})


@pytest.fixture
def run(tmp_path):
    return RunDir.claim(tmp_path, "mine", SPEC)


class Broken:
    run_id = "x"

    def __init__(self, run, spec, run_id):
        self.calls = 0

    def log(self, step, values):
        self.calls += 1
        raise ConnectionError("server gone\nand more")

    def close(self, status="finished"):
        raise ConnectionError("server gone")


def unopenable(run, spec, run_id):
    raise ConnectionError("no route to host")


def test_a_missing_package_is_rejected(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, code in (("wandb", "not-installed"), ("abc", "unknown-name")):
        with expect_error(code, "train.loggers"):
            check_loggers((name,))


def test_a_logger_that_fails_is_dropped_with_one_warning(run, monkeypatch):
    monkeypatch.setitem(module.KINDS, "tensorboard", Broken)
    said = []
    (logger,) = open_loggers(("tensorboard",), run, SPEC, said.append)
    for step in range(3):
        logger.log(step, {"loss": 1.0})
    logger.close()
    assert said == [
        "warning: logger 'tensorboard' failed and is dropped, training continues: ConnectionError: server gone"
    ]


def test_a_logger_that_cannot_be_opened(run, monkeypatch):
    monkeypatch.setitem(module.KINDS, "tensorboard", unopenable)
    with expect_error("unavailable", "train.loggers"):
        open_loggers(("tensorboard",), run, SPEC)
    monkeypatch.setitem(module.KINDS, "tensorboard", Broken)
    assert len(open_loggers(("tensorboard",), run, SPEC)) == 1
    monkeypatch.setitem(module.KINDS, "tensorboard", unopenable)
    said = []
    assert open_loggers(("tensorboard",), run, SPEC, said.append) == []
    assert said[0].endswith("no route to host; training continues without it")


def log_twice(name, run, **more):
    """Log four steps, half of them by a run that was resumed; return the id that both had."""
    ids = set()
    for first, status in ((1, "stopped"), (3, "finished")):
        (logger,) = open_loggers((name,), run, SPEC)
        for step in (first, first + 1):
            logger.log(step, {"kind": "step", "t": 1.0, "step": step, "loss": step / 4, **more})
        logger.close(status)
        ids.add(read_json(run.path / "loggers.json")[name])
    (run_id,) = ids
    return run_id


def test_trackio(run, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run.path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    name = log_twice("trackio", run)
    found = [row["loss"] for row in SQLiteStorage.get_logs("paceline", name) if "loss" in row]
    assert found == [i / 4 for i in (1, 2, 3, 4)]


def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice("tensorboard", run, skipped=False, lr=None)
    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["loss", "skipped"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(i, i / 4) for i in (1, 2, 3, 4)]


def test_wandb_offline(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_id = log_twice("wandb", run)
    files = list((run.path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert files
    assert all(file.stat().st_size > 0 for file in files)


def test_mlflow(run, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_id = log_twice("mlflow", run, note="not a number")
    client = MlflowClient(tracking_uri=(run.path / "mlflow").as_uri())
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["train.lr"] == "0.25"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "loss")] == [(i, i / 4) for i in (1, 2, 3, 4)]
