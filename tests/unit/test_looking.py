"""Looking at a run executes nothing of it, wherever the run came from."""

import json

import pytest
import torch
from safetensors import safe_open

from paceline.cli import main
from paceline.record.run_dir import RunDir
from paceline.reporting.report import report
from paceline.training.checkpoints.writer import CheckpointWriter
from paceline.using.export import export
from report_runs import make_run


@pytest.fixture
def hostile(tmp_path):
    """A copied run that names code, which leaves a mark if it is ever executed."""
    run = make_run(tmp_path, "copied", 2)
    for name, mark in (("evil.py", "imported"), ("evil/__init__.py", "package imported")):
        file = run / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write('{mark}')\n")
    text = RunDir(run).spec_file.read_text()
    return run, text, tmp_path / "mark"


WORKLOADS = ["{run}/evil.py:W", "evil:W", "{run}/evil.py", "not_installed"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_report_and_watch_read_the_spec_as_data(workload, hostile, monkeypatch, capsys, tmp_path):
    run, text, mark = hostile
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    workload = workload.format(run=run)
    lines = [f"workload: {json.dumps(workload)}" if line.startswith("workload:") else line for line in text.split("\n")]
    at = next(i for i, line in enumerate(lines) if line.startswith("model:"))
    RunDir(run).spec_file.write_text("\n".join([*lines[: at + 1], "  wings: [1, 2]", *lines[at + 1 :]]))
    made = report([run], tmp_path / "report")
    assert {("workload", workload), ("model.wings", "[1, 2]"), ("model.width", "64")} <= set(made.contents.spec)
    for words in (["watch", str(run), "--once"], ["explain", str(run)], ["explain", str(run / "spec.yaml")]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        assert "copied" in capsys.readouterr().out
    assert not mark.exists()


def test_weights_are_written_without_the_code(hostile, tmp_path):
    run, text, mark = hostile
    saved = CheckpointWriter(run / "checkpoints", keep=1)
    saved.save({"model": {"weight": torch.arange(3.0)}}, {"step": 60, "evaluation": {}, "best": None})
    saved.close()
    RunDir(run).spec_file.write_text(text.replace("workload: classifier", f"workload: {run}/evil.py:W"))
    export(run, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.get_tensor("weight").tolist() == [0, 1, 2]
        assert json.loads(file.metadata()["paceline_spec"])["workload"].endswith("evil.py:W")
    assert not mark.exists()
