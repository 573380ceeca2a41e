"""Ranks that others have started: the existing environment is used, and the answer is the same."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import RunResult, train
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Summary
from script_runs import HEAD, script

pytestmark = pytest.mark.usefixtures("warm_ranks")

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
LAUNCHERS = {"torchrun": TORCHRUN, "mpirun": MPIRUN}


@pytest.fixture(scope="module")
def ours(small, tmp_path_factory):
    return train(small.replace({"parallel.ranks": 2}), tmp_path_factory.mktemp("ours"), show=False)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_another_launcher_train_the_same(small, ours, tmp_path, launcher):
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"{launcher} is not installed")
    run_file = RunDir.claim(tmp_path, "spec", small).spec_file
    command = [*LAUNCHERS[launcher], "-m", "paceline", "train", str(run_file), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    theirs = RunResult(folder, Summary()).weights()
    assert len(list((folder / "events").iterdir())) == 2
    assert "2 ranks" in done.stdout
    for name, tensor in ours.weights().items():
        assert torch.equal(tensor, theirs[name]), name


def test_ranks_of_torchrun_that_disagree_say_so(tmp_path):
    file = script(tmp_path, head=HEAD.replace("torch.manual_seed(0)", "torch.seed()"))
    done = subprocess.run([*TORCHRUN, file.name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "(exitcode: 2)" in done.stderr
    assert len(re.findall("^paceline: ", done.stderr, re.MULTILINE)) == 1


def test_check_divides_again_on_the_ranks_of_torchrun(tiny_lm, tmp_path):
    """An equal grid of an earlier layout had other process groups."""
    run_file = RunDir.claim(tmp_path, "spec", tiny_lm.replace({"train.evaluate_on": 8})).spec_file
    layouts = "single,fsdp:2+tensor:2,tensor:2+context:2"
    command = [*TORCHRUN[:-1], "--nproc-per-node=4", "-m", "paceline", "check", str(run_file), "--layouts", layouts]
    done = subprocess.run([*command, "--steps=2"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
