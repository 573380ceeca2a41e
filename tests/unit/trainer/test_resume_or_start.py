"""`train --resume-or-start`: one command that begins, goes on, or leaves a finished run as it is."""

import shutil

import pytest
import torch

from paceline import UserError, Workload, train
from paceline.cli.main import main
from paceline.config import build_spec
from paceline.runlog.events import RunStatus, read_events
from paceline.runlog.run_dir import RunDir


class Line(Workload):
    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, split):
        return torch.arange(10.0)[:, None] if split == "train" else None

    def loss(self, model, batch):
        return (model(batch) - 2 * batch).square().sum(), len(batch)


@pytest.fixture
def line():
    train = {"steps": 4, "global_batch": 4, "lr": 0.01, "checkpoint_every": 2}
    return build_spec({"name": "line", "workload": f"{__name__}:Line", "train": train, "parallel": {"device": "cpu"}})


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
    assert all(tensor.equal(alone[name]) for name, tensor in third.weights().items())


def test_a_finished_run_whose_last_checkpoint_was_damaged_is_mended(line, tmp_path):
    found = train(line, tmp_path, resume_or_start=True, show=False)
    alone = found.weights()
    victim = next((found.path / "checkpoints" / "step-00000004").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    mended = train(line, tmp_path, resume_or_start=True, show=False)
    assert [event["step"] for event in read_events(RunDir(found.path).events_file(0), "resume")] == [2]
    assert all(tensor.equal(alone[name]) for name, tensor in mended.weights().items())


def test_a_longer_run_goes_on(line, tmp_path):
    train(line, tmp_path, resume_or_start=True, show=False)
    longer = train(line.replace({"train.steps": 6}), tmp_path, resume_or_start=True, show=False)
    assert (longer.path, longer.summary.trained.steps) == (tmp_path / "line", 6)


def test_another_answer_in_the_same_folder_is_refused(line, tmp_path):
    train(line, tmp_path, resume_or_start=True, show=False)
    with pytest.raises(UserError) as refused:
        train(line.replace({"train.lr": 0.5}), tmp_path, resume_or_start=True, show=False)
    assert (refused.value.code, refused.value.key) == ("conflict", "train.lr")


def test_a_wrong_request_leaves_what_was_in_the_folder(line, tmp_path):
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "notes.txt").write_text("mine")
    with pytest.raises(UserError):
        train(line, tmp_path, init_from=tmp_path / "nothing.safetensors", resume_or_start=True, show=False)
    assert [path.name for path in (tmp_path / "line").iterdir()] == ["notes.txt"]


def test_a_run_folder_is_named_instead_of_a_run_file(line, tmp_path, capsys):
    train(line, tmp_path, show=False)
    with pytest.raises(SystemExit) as left:
        main(["train", str(tmp_path / "line"), "--resume-or-start"])
    assert left.value.code == 0
    assert "is finished: nothing is left to do" in capsys.readouterr().out
