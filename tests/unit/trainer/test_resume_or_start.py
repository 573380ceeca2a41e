"""Runs that resume: by one command that starts or resumes, or made longer, bit for bit if possible."""

import shutil

import pytest
import torch
from torch import nn

from paceline import UserError, Workload, resume, train
from paceline.config import build_spec
from paceline.runlog.events import RunStatus, read_events
from paceline.runlog.run_dir import RunDir
from results import assert_same_bits, expect_error, steps_of

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


class Own(Workload):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def data(self, split):
        return X if split == "train" else X[:10]

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)


def spec_of(**fields):
    values = {"name": "run", "workload": f"{__name__}:Own", "parallel": {"device": "cpu"}}
    plain = {"epochs": 3, "global_batch": 16, "schedule": "constant", "warmup": 0.0}
    return build_spec({**values, "train": {**plain, **fields}})


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return train(spec_of(), tmp_path_factory.mktemp("three"), show=False).path


def losses(path):
    return [(event["step"], event["loss"], event["lr"]) for event in steps_of(path)]


def test_three_and_two_epochs_are_five_bit_for_bit(tmp_path, three, capfd):
    whole = train(spec_of(epochs=5), tmp_path, show=False)
    folder = tmp_path / "longer"
    shutil.copytree(three, folder)
    longer = resume(folder, {"train.epochs": "+2"})
    assert "train.epochs is 5 instead of 3" in capfd.readouterr().out
    assert losses(folder) == losses(whole.path)
    assert_same_bits(longer, whole)
    assert longer.metrics == whole.metrics

    run = RunDir(folder)
    assert run.spec().train.epochs == 5
    assert run.spec().origin("train.epochs") == "extended from 3"
    assert [(e["before"], e["now"]) for e in read_events(run.events_file(0), "extend")] == [(3, 5)]
    assert resume(folder, show=False).status == "finished", "as long as the folder says"


def test_a_changed_schedule_is_said_before_it_is_trained(tmp_path, capfd):
    path = train(spec_of(schedule="cosine", warmup=0.1, epochs=2), tmp_path, show=False).path
    before = losses(path)[-1][2]
    resume(path, ["train.epochs=3"])
    after = losses(path)[8][2]
    assert after > 100 * before
    assert f"{after:.3g} at step 9 after {before:.3g} at step 8" in capfd.readouterr().out


REFUSED = {
    "shorter": ({"train.epochs": 2}, "conflict", "train.epochs"),
    "counted otherwise": ({"train.steps": 100}, "conflict", "train.steps"),
    "added otherwise": ({"train.steps": "+1"}, "invalid-value", "train.steps"),
    "nothing added": ({"train.epochs": "+0"}, "invalid-value", "train.epochs"),
    "no number": ({"train.epochs": "+1.5"}, "invalid-value", "train.epochs"),
    "something else too": ({"train.epochs": "+1", "train.lr": 1.0}, "conflict", "train.lr"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_longer_is_refused(three, name):
    given, code, key = REFUSED[name]
    with expect_error(code, key):
        resume(three, given, show=False)
    assert RunDir(three).spec().train.epochs == 3


@pytest.fixture
def line():
    plain = {"steps": 4, "epochs": None, "lr": 0.01, "checkpoint_every": 2}
    return spec_of(**plain).replace({"name": "line"})


def test_the_same_command_begins_goes_on_and_is_done(line, tmp_path, monkeypatch):
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "slurm-7.out").write_text("of another job")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = train(line, tmp_path, resume_or_start=True, show=False)
    alone = first.weights()
    shutil.rmtree(first.path / "checkpoints" / "step-00000004")  # as if it had been killed before the end
    (first.path / "summary.json").unlink()
    second = train(line, tmp_path, resume_or_start=True, show=False)
    third = train(line, tmp_path, resume_or_start=True, show=False)
    assert first.path == second.path == third.path == tmp_path / "line"
    assert [result.summary.trained.steps for result in (first, second, third)] == [4, 4, 4]
    events = RunDir(third.path).events_file(0)
    assert [event["step"] for event in read_events(events, "resume")] == [2]
    assert [event["job"] for event in read_events(events, "start")] == ["7", "7"]  # the third had nothing to do
    assert third.status == RunStatus.FINISHED
    assert_same_bits(third, alone)


def test_a_longer_run_goes_on_and_another_answer_in_its_folder_is_refused(line, tmp_path):
    train(line, tmp_path, resume_or_start=True, show=False)
    longer = train(line.replace({"train.steps": 6}), tmp_path, resume_or_start=True, show=False)
    assert (longer.path, longer.summary.trained.steps) == (tmp_path / "line", 6)
    with expect_error("conflict", "train.lr"):
        train(line.replace({"train.steps": 6, "train.lr": 0.5}), tmp_path, resume_or_start=True, show=False)


def test_a_wrong_request_leaves_what_was_in_the_folder(line, tmp_path):
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "notes.txt").write_text("mine")
    with pytest.raises(UserError):
        train(line, tmp_path, init_from=tmp_path / "nothing.safetensors", resume_or_start=True, show=False)
    assert [path.name for path in (tmp_path / "line").iterdir()] == ["notes.txt"]


def test_a_run_folder_is_named_instead_of_a_run_file(line, tmp_path, ask):
    train(line, tmp_path, show=False)
    answer = ask("train", tmp_path / "line", "--resume-or-start")
    assert answer.code == 0
    assert "is finished: nothing is left to do" in answer.out
