"""A run does not go on to another answer without a word: its spec, its data and its code are sealed with it."""

import shutil
from pathlib import Path

import pytest

from paceline import resume, train, trust
from paceline.config import build_spec
from paceline.runlog.run_dir import RunDir
from paceline.trainer.resume_guard import collect_determining_values, find_user_files
from results import expect_error

OWN = """
import numpy as np
import torch
from paceline import Workload


class Line(Workload):
    def fingerprint(self):
        return DATA

    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, split):
        return [(np.ones(2, np.float32) * i, np.ones(1, np.float32)) for i in range(8)]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


DATA = "these"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answer")
    (folder / "own.py").write_text(OWN)
    values = {
        "workload": f"{folder}/own.py:Line",
        "data": {"workers": 0},
        "train": {"steps": 2, "global_batch": 4, "lr": 0.1},
        "parallel": {"threads": 1, "device": "cpu"},
    }
    return train(build_spec(values), folder / "runs", show=False).path


@pytest.fixture
def run(trained, tmp_path):
    """A copy, with a copy of its code."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.copy(trained.parents[1] / "own.py", tmp_path / "own.py")
    edit(tmp_path / "run", f"{trained.parents[1]}/own.py", f"{tmp_path}/own.py")
    trust(tmp_path / "run")
    return tmp_path / "run"


def edit(run, old, new):
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace(old, new))


def test_what_is_moved_and_not_changed_goes_on(run):
    assert resume(run, {"train.steps": "+2"}, show=False).summary.trained.steps == 4


def assert_conflict(key, run, overrides=(), **how):
    with expect_error("conflict", key) as refused:
        resume(run, overrides, show=False, **how)
    return str(refused.value)


def test_an_edited_spec_is_named(run):
    edit(run, "  lr: 0.1\n", "  lr: 0.5\n")
    line = assert_conflict("train.lr", run, {"train.steps": "+2"})
    assert line.endswith(f"paceline train --from {run} train.lr=0.5")


def test_a_length_that_was_edited_is_named(run):
    """The schedule would be another."""
    edit(run, "  steps: 2\n", "  steps: 4\n")
    assert_conflict("train.steps", run)
    edit(run, "  steps: 4\n", "  steps: 2\n")
    assert resume(run, {"train.steps": "+2"}, show=False).summary.trained.steps == 4


def test_damaged_origins_lose_no_value(run):
    (run / "spec_origins.json").write_text('{"x')
    assert RunDir(run).recorded_spec().train.lr == 0.1


def test_changed_code_is_named_and_goes_on_if_it_is_meant(run, capsys):
    (run.parent / "own.py").write_text(OWN + "\n# a word more\n")
    line = assert_conflict("workload", run, {"train.steps": "+2"})
    assert line.endswith(f"paceline train --resume {run} --changed-code")
    assert resume(run, {"train.steps": "+2"}, changed_code=True).summary.trained.steps == 4
    assert "as it is now" in capsys.readouterr().out
    assert resume(run, {"train.steps": "+2"}, show=False).summary.trained.steps == 6  # it was saved with that code


def test_other_data_are_named(run):
    (run.parent / "own.py").write_text(OWN.replace('"these"', '"others"'))
    (run / "events" / "rank0.jsonl").unlink()  # the checkpoint knows it too
    assert_conflict("data.path", run, {"train.steps": "+2"}, changed_code=True)


def test_what_determines_an_answer(small):
    """Neither where files lie nor how the work is spread."""
    same = small.replace({"name": "other", "parallel.ranks": 2, "data.cache": "elsewhere", "train.keep": 7})
    assert collect_determining_values(small) == collect_determining_values(same)
    for key, value in (("train.seed", 1), ("model.width", 64), ("data.limit", 7), ("parallel.reduce", "bf16")):
        assert collect_determining_values(small) != collect_determining_values(small.replace({key: value})), key


def test_files_of_one_name_and_run_files_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").touch()
        (tmp_path / name / "net.yaml").write_text("workload: m.py:W\n")
    members = [str(tmp_path / name / "net.yaml") for name in ("a", "b")]
    spec = build_spec({"workload": "ensemble", "model": {"members": members}})
    found = {name: str(file.relative_to(tmp_path)) for name, file in find_user_files(spec).items()}
    assert found == {"m.py": "a/m.py", "m.py (2)": "b/m.py", "net.yaml": "a/net.yaml", "net.yaml (2)": "b/net.yaml"}


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        ({"workload": "transformers", "model": {"init_from": "m"}}, ["m/config.json", "m/preprocessor_config.json"]),
        ({"workload": "transformers", "model": {"config": "m/config.json", "init_from": "w"}}, ["m/config.json"]),
        ({"workload": "keras", "model": {"build": "net.keras"}}, ["net.keras"]),
    ],
)
def test_files_that_describe_a_model_determine_the_answer(tmp_path, monkeypatch, spec, files):
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    assert [str(file) for file in find_user_files(build_spec(spec)).values()] == files
