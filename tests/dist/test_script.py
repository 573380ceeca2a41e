"""A script with its own loop on several ranks: the same answer on any layout, however it was started or killed."""

import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from as_main import run_as_main

import paceline
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import check
from results import losses
from script_runs import LOOP, script, script_spec, write_digits

pytestmark = pytest.mark.usefixtures("warm_ranks")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "moving"
DIES_ONCE = LOOP.replace("paceline.run()", "paceline.run('run.yaml')").replace(
    "    for x, y",
    """    from pathlib import Path
    import os, time
    def die_once(step):
        if step == 5 and not Path("died").exists():
            Path("died").touch()
            while not Path("runs/killed/checkpoints/step-00000003").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
    for x, y""",
)
DIES_ONCE = DIES_ONCE.replace(", len(y))\n", ", len(y))\n        die_once(run.steps)\n", 1)
RUN_FILE = "name: killed\ntrain: {steps: 8, global_batch: 16, checkpoint_every: 3}\nparallel: {threads: 1}\n"


def test_the_answer_is_that_of_one_rank(tmp_path):
    spec = script_spec(script(tmp_path), data={"workers": 1})
    rows = check(spec, layouts=["single", "ddp:2", "ddp:4", "fsdp:2"], steps=4).rows
    rows += check(spec, ranks=(1,), accumulate=(1, 3), steps=4).rows
    assert [row.accumulate for row in rows] == [1, 1, 1, 1, 1, 3]
    for row in rows:
        assert max(row.loss, row.grad_norm) < 1e-6, row.name
        assert row.evaluation < 1e-6, row.name
        assert row.weights < 1e-5, row.name


def test_a_loss_that_no_other_rank_would_hear_of_is_refused(tmp_path):
    file = script(tmp_path, LOOP.replace("F.cross_entropy(model(x)", "F.cross_entropy(model[2](model[0](x).relu())"))
    with pytest.raises(UserError, match="without a call"):
        paceline.train(script_spec(file, parallel={"ranks": 2}), tmp_path / "runs", show=False)


def test_a_script_that_was_killed_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    file = script(tmp_path, DIES_ONCE)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    died = subprocess.run([sys.executable, file.name], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    monkeypatch.chdir(tmp_path)
    resumed = paceline.resume("runs/killed", show=False)
    spec = paceline.load("run.yaml", {"workload": "train.py"})
    whole = paceline.train(spec, "whole", show=False)
    assert [e["step"] for e in read_events(RunDir(Path("runs/killed")).events_file(0), "resume")] == [3]
    assert losses("runs/killed") == losses(whole.path)
    ours, theirs = whole.weights(), resumed.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert resumed.metrics == whole.metrics


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "data" / "mnist")
    return folder


def test_the_page_from_pytorch_runs_before_and_after(digits, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(digits)
    runpy.run_path(str(EXAMPLES / "pytorch_before.py"), run_name="__main__")
    assert float(re.findall(r"accuracy (\S+)", capsys.readouterr().out)[-1]) > 0.1
    spec = paceline.load(EXAMPLES / "pytorch_after.yaml", {"parallel.threads": 1})
    found = paceline.measure(spec, (1, 2), steps=4, repeats=1, out=tmp_path / "measured")
    assert [row.ranks for row in found.rows] == [1, 2]
    assert losses(tmp_path / "measured" / "2-ranks-1") == pytest.approx(
        losses(tmp_path / "measured" / "1-rank-1"), rel=1e-6
    )


def test_the_page_from_ddp_runs_before_and_after(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp_after.yaml").write_bytes((EXAMPLES / "ddp_after.yaml").read_bytes())
    (tmp_path / "ddp_after.py").write_bytes((EXAMPLES / "ddp_after.py").read_bytes())
    found = {}
    for file in (str(EXAMPLES / "ddp_before.py"), "ddp_after.py"):
        run_ranks(run_as_main, (file,), 2)
        found[file] = re.findall(r"^epoch \d: accuracy (\S+) of (\d+)$", capfd.readouterr().out, re.MULTILINE)
    (before, after) = found.values()
    assert [count for _, count in before] == ["204"] * 3  # DistributedSampler has counted one of them twice
    assert [count for _, count in after] == ["203"] * 3
    assert min(float(before[-1][0]), float(after[-1][0])) > 0.9
    assert RunDir.open(tmp_path / "runs" / "circle").start()["ranks"] == 2
