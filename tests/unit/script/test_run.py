"""`paceline.run` in a script that was started by hand or is asked something, and the model that it gets back."""

import copy
import io
import runpy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import RunFailed, UserError
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.script.api import ModelView
from paceline.script.probe import LossProbe, ProbeRun
from paceline.script.run import build_script_spec, derive_script_spec
from paceline.trials.check import check
from results import expect_error
from script_runs import HEAD, LOOP, script, script_spec

BY_HAND = LOOP.replace("paceline.run()", "paceline.run('run.yaml', resume='auto')").replace(
    "len(y))\n", "len(y))\n        if 'fail' in sys.argv and run.steps == 5: raise ValueError('as asked')\n", 1
)
RUN_FILE = "name: hand\ndata: {workers: 0}\ntrain: {steps: 6, global_batch: 16, checkpoint_every: 3}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    script(tmp_path, BY_HAND)
    return tmp_path


def by_hand(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    runpy.run_path("train.py", run_name="__main__")


def test_a_run_that_failed_goes_on_by_itself(folder, monkeypatch, capsys):
    with pytest.raises(ValueError, match="as asked") as failed:
        by_hand(monkeypatch, "fail")
    assert failed.value.__notes__ == ["  resume at step 3 with  paceline train --resume runs/hand"]
    spec = RunDir(folder / "runs" / "hand").spec()
    assert (spec.workload, spec.data.arguments) == (str(folder / "train.py"), ("fail",))
    by_hand(monkeypatch)
    assert "step 3 of 6" in capsys.readouterr().out
    assert read_summary(folder / "runs" / "hand" / "summary.json").status == "finished"
    by_hand(monkeypatch)
    assert sorted(run.name for run in (folder / "runs").iterdir()) == ["hand", "hand-2"]


@pytest.mark.parametrize(
    ("line", "code", "key"),
    [
        ("workload: lm", "conflict", "workload"),
        ("workload: other.py", "conflict", "workload"),
        ("parallel: {ranks: 4}", "conflict", "parallel.ranks"),
        ("trian: {}", "unknown-key", "trian"),
    ],
)
def test_a_run_file_that_does_not_fit_is_rejected(line, code, key, folder, monkeypatch):
    (folder / "run.yaml").write_text(f"{RUN_FILE}{line}\n")
    with expect_error(code, key):
        by_hand(monkeypatch)
    assert not (folder / "runs").exists()


def test_user_error_of_a_script_is_one_line(folder, monkeypatch, capfd):
    script(folder, BY_HAND.replace(', reduction="sum"), len(y))', "), len(y))", 1))
    with pytest.raises(UserError, match="got a mean") as refused:
        by_hand(monkeypatch)
    assert not list((folder / "runs").iterdir())
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        sys.excepthook(UserError, refused.value, None)
    assert left.value.code == 2
    assert capfd.readouterr().err.startswith("paceline: run.step: ")


def test_a_program_without_a_file_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(UserError, match="by a script"), paceline.run("run.yaml"):
        pass


def test_script_without_a_run_file(tmp_path):
    values = {"train": {"steps": 9, "global_batch": 4}}
    spec = build_script_spec(values, {"train.steps": 3}, tmp_path / "mine.py", [])
    assert (spec.name, spec.train.steps, spec.train.global_batch, values["train"]["steps"]) == ("mine", 3, 4, 9)
    spec = build_script_spec(None, {"train.steps": 3}, tmp_path / "mine.py", [])
    assert (spec.name, spec.train.steps, spec.origin("train.steps")) == ("mine", 3, "this script")


def test_verb_takes_a_script(folder):
    spec = derive_script_spec(folder / "train.py", ["parallel.ranks=2"])
    assert (spec.name, spec.train.steps, spec.parallel.ranks) == ("hand", 6, 2)
    assert spec.workload == str(folder / "train.py")
    (folder / "train.py").write_text("1 / 0\n")
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        derive_script_spec(folder / "train.py")


def test_ignored_arguments_are_logged(tmp_path, capsys):
    loop = LOOP.replace("paceline.run()", "paceline.run('nowhere.yaml', ['train.lr=7', 'train.steps=2'])")
    spec = script_spec(script(tmp_path, loop), train={"steps": 2})
    assert paceline.train(spec, tmp_path / "runs").status == "finished"
    said = capsys.readouterr().out
    assert "ignored in paceline.run: train.lr=7" in said


SUM = 'F.cross_entropy(model(x), y, reduction="sum")'


def test_model_data_and_loss_are_the_scripts_own(tmp_path, capsys):
    spec = script_spec(script(tmp_path, "print('hello')\n" + LOOP))
    model, (dataset, collate) = ProbeRun(spec, "model").ask(), ProbeRun(spec).ask()
    assert len(dataset) == 53
    assert collate is None
    x, y = torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)
    total, count = LossProbe(spec, model, (x, y)).ask()
    assert count == 5
    assert total.item() == pytest.approx(torch.nn.functional.cross_entropy(model(x), y, reduction="sum").item())
    assert not capsys.readouterr().out


def test_draws_of_a_pass_are_its_own(tmp_path):
    spec = script_spec(script(tmp_path, LOOP.replace(SUM, f"{SUM} * torch.rand(())", 1)))
    model, batch = ProbeRun(spec, "model").ask(), (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    torch.manual_seed(7)
    first, second = LossProbe(spec, model, batch).ask()[0], LossProbe(spec, model, batch).ask()[0]
    torch.manual_seed(7)
    assert first.item() == LossProbe(spec, model, batch).ask()[0].item() != second.item()


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (SUM, "F.cross_entropy(model(x), y) * 1.0", "did you return a mean?"),
        ("nn.GELU()", "nn.RReLU()", "torch's generator"),
    ],
)
def test_causes_are_found_in_a_script(old, new, cause, tmp_path):
    file = script(tmp_path, LOOP.replace(old, new, 1), HEAD.replace(old, new, 1))
    parity = check(script_spec(file), ranks=(1,), accumulate=(1, 3), steps=1)
    assert not parity.holds
    assert cause in parity.causes[0]


def test_a_script_that_trains_by_itself_is_stopped_at_its_first_step(tmp_path):
    file = tmp_path / "train.py"
    lines = ("w = torch.nn.Linear(1, 1)", "optimizer = torch.optim.SGD(w.parameters(), 0.1)", "while True:")
    file.write_text("\n".join(("import torch", *lines, "    optimizer.step()\n")))
    with expect_error("invalid-workload", "run.batches"):
        ProbeRun(script_spec(file), "model").ask()


@pytest.fixture
def wrapping():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ModelView(DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        dist.destroy_process_group()


def test_copies_are_of_the_model_itself(wrapping):
    model, file, x = wrapping.model, io.BytesIO(), torch.ones(1, 2)
    before = model(x).detach()
    torch.save(model, file)
    twins = copy.deepcopy(model), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    wrapping.called = False
    with torch.no_grad():
        model.weight += 1
    for twin in twins:
        assert type(twin) is nn.Linear
        assert torch.equal(twin(x), before)
    assert not wrapping.called
    assert not torch.equal(model(x), before)
