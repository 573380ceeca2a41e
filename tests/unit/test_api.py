"""`train` and the other verbs from Python: what they take as a run, and that every door applies the plan."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from noisy_data import NoisyData

import paceline
import paceline.topics
from paceline import Workload, plan, resume, train
from paceline.config import load, registry, resolve_spec
from paceline.config.run_spec import apply_settings
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.trials.runner import train_trial
from paceline.workload import build_workload
from paceline.workloads.ensemble.workload import train_member
from results import expect_error

RECIPE = Path(__file__).parents[2] / "recipes" / "lm_7b.yaml"


def test_a_run_is_meant_in_any_of_four_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("workload: topics\nname: some\ndata: {path: counts.npz}\n")
    spec = load(file)
    content = {"workload": "topics", "name": "some", "data": {"path": "counts.npz"}}
    for source in (spec, file, str(file), content):
        assert resolve_spec(source).dump() == spec.dump()
    assert content["data"] == {"path": "counts.npz"}, "what is given stays as it was"
    assert resolve_spec(NoisyData).workload.endswith("noisy_data.py:NoisyData")
    assert isinstance(build_workload(resolve_spec(NoisyData)), Workload)
    assert plan({"workload": "lm"}, cluster="2xA100", samples=1000).rows


@pytest.mark.parametrize(
    "source", [5, int, type("Local", (Workload,), {"__module__": "__main__"}), "nowhere.yaml"], ids=str
)
def test_what_is_no_run_is_rejected(source):
    with pytest.raises(UserError):
        train(source)


@pytest.mark.parametrize(
    "init", ["def __init__(self):\n        pass", "def __init__(self, spec):\n        pass"], ids=["none", "lost"]
)
def test_own_init_takes_the_spec(init, tmp_path):
    file = tmp_path / "own.py"
    methods = "".join(f"    def {name}(self, *words):\n        pass\n" for name in ("model", "data", "loss"))
    file.write_text(f"from paceline import Workload\n\n\nclass Own(Workload):\n    {init}\n{methods}")
    with pytest.raises(UserError, match=r"def __init__\(self, spec\)"):
        train({"workload": f"{file}:Own"}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="the devices of the plan are here")
def test_plan_for_absent_devices_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"plan takes \d CUDA"):
        train({"cluster": "8xA100", "parallel": "auto", "data": {"source": "docstrings"}}, tmp_path)
    assert not list(tmp_path.iterdir())


class Opened(Exception):
    """Raised in place of opening a run, with the spec that would have been trained."""


DOORS = {
    "train": train,
    "resume or start": partial(train, resume_or_start=True),
    "sweep": train_trial,
    "ensemble": train_member,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_applies_the_plan(door, tmp_path, monkeypatch):
    def open_run(spec, *_, **__):
        raise Opened(spec)

    monkeypatch.setattr("paceline.api.open_run", open_run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    spec = load(RECIPE, ["parallel=auto", "cluster=1x8xH100"])
    with pytest.raises(Opened) as opened:
        DOORS[door](spec, tmp_path)
    layout = layout_of(opened.value.args[0])
    assert (layout.strategy, layout.ranks) == ("fsdp", 8)


LENGTH = 4


def make_net():
    class Net(Workload):
        """Of no file: its ranks get it by value, with what it refers to."""

        def model(self):
            return torch.nn.Linear(LENGTH, 2)

        def data(self, split):
            rows = torch.randn(40, LENGTH, generator=torch.Generator().manual_seed(len(split)))
            return rows, (rows.sum(1) > 0).long()

        def loss(self, model, batch):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

        def encode(self, inputs):
            return torch.tensor([list(row.values()) for row in inputs])

        def predict(self, model, batch):
            return {"probabilities": model(batch).softmax(1)}

    return Net


def test_a_class_without_a_file_trains_on_ranks(tmp_path, capsys):
    Net = make_net()
    values = {"lr": 1e-2, "global_batch": 8}
    one, two = (train(Net, tmp_path, ranks=ranks, epochs=2, **values, show=ranks == 1) for ranks in (1, 2))
    assert capsys.readouterr().out.count("by value") == 1
    assert two.summary.ranks == 2
    assert two.summary.loss_last == pytest.approx(one.summary.loss_last, rel=1e-5)
    more = resume(two.path, {"train.epochs": "+1"}, show=False)
    assert more.summary.trained.steps == 15
    assert len(paceline.open(two.path).predict([dict.fromkeys("abcd", 1.0)])) == 1
    registry._classes.clear()  # as in another process
    with expect_error("not-found"):
        paceline.open(two.path)
    last = train(Net, resume=more.path, epochs=4, **values, ranks=2, show=False)
    assert last.summary.trained.steps == 20


def test_what_cannot_be_sent_by_value_is_named(tmp_path):
    Net, lock = make_net(), threading.Lock()
    Net.data = lambda self, split: lock
    with expect_error("invalid-workload"):
        train(Net, tmp_path, ranks=2, epochs=1, show=False)


@pytest.mark.parametrize(
    ("settings", "key", "named"),
    [
        ({"lrr": 1}, "lrr", "'lr'"),
        ({"lr": -1}, "train.lr", "(argument lr)"),
        ({"schedule": "cosine"}, "schedule", "parallel="),
        ({"epochs": 1, "steps": 2}, "train", "drop one"),
    ],
)
def test_the_argument_is_named(settings, key, named, tmp_path):
    with pytest.raises(UserError) as error:
        train(NoisyData, tmp_path, **settings)
    assert error.value.key == key
    assert named in str(error.value)


def test_settings_are_values_of_the_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = resolve_spec({"workload": "lm", "train": {"epochs": 3}})
    spec = apply_settings(given, {"steps": 5, "data": {"path": Path("a.txt")}})
    assert (spec.train.steps, spec.train.epochs, spec.data.path) == (5, None, tmp_path / "a.txt")
    assert apply_settings(resolve_spec({}), {"path": "t.csv"}).data.source == "csv"
    assert spec.origin("train.steps") == "argument steps"


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_tables_in_memory(library, tmp_path):
    module = pytest.importorskip(library)
    rows = {"size": [*range(40)], "town": ["Oslo", "Rome"] * 20, "big": [size > 20 for size in range(40)]}
    build = module.table if library == "pyarrow" else module.DataFrame
    frame = build(rows)
    run = train({"workload": "trees", "data": frame}, tmp_path, label="big", steps=3, show=False)
    model = paceline.open(run.path)
    found = model.predict(frame)
    assert type(found) is type(frame)
    assert found.shape[0] == 40
    assert "predicted" in (found.column_names if library == "pyarrow" else found.columns)
    assert "\n" not in repr(model)
    assert len(repr(model)) < 200
    counts = paceline.topics.fit(build({"a": [1, 2, 3], "b": [3, 0, 1], "c": [0, 1, 4]}), 2)
    assert list(counts.terms) == ["a", "b", "c"]
    with expect_error("unknown-name", "data.label") as error:
        train({"workload": "trees"}, tmp_path, data=frame, label="bigg", steps=3, show=False)
    assert "argument data" in str(error.value)
