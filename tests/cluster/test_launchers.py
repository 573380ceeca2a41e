"""Two nodes of a real Slurm under srun, torchrun (c10d) and mpirun: every layout has the answer of one rank."""

import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from runs import LAYOUTS, says_the_same

from paceline import RunResult
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary

PYTHON = [sys.executable, "-m"]


def srun(words):
    return ["srun", "--nodes=2", "--ntasks-per-node=2", *PYTHON, "paceline", *words]


def mpirun(words):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    allocated = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    return [*allocated, "mpirun", "--allow-run-as-root", "-x", "PYTHONPATH", *PYTHON, "paceline", *words]


def torchrun(words):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{port}", "--rdzv-id=1", "--nnodes=2", "--nproc-per-node=2"]
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", *PYTHON, "torch.distributed.run", *meeting]
    return [*command, "-m", "paceline", *words]


LAUNCHERS = (srun, mpirun, torchrun)


@pytest.fixture
def say(lab, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(launcher, *words):
        lab.until_ready()
        done = subprocess.run(launcher(words), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_have_the_answer_of_one_rank(launcher, layout, say, lm_file, alone, tmp_path):
    words = [f"parallel.{key}={value}" for key, value in LAYOUTS[layout].items()]
    say(launcher, "train", str(lm_file), "--quiet", "--out", str(tmp_path), *words)
    run = RunDir(tmp_path / "nodes")
    starts = [event for rank in range(4) for event in read_events(run.events_file(rank), "start")]
    assert {start["host"] for start in starts} == {"n1", "n2"}
    says_the_same(RunResult(run.path, read_summary(run.summary_file)), alone)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_topics_and_check(launcher, say, lm_file, tmp_path):
    counts = tmp_path / "counts.npy"
    np.save(counts, np.random.default_rng(0).poisson(1.0, (60, 40)))
    say(launcher, "topics", str(counts), "-k", "3", "--quiet", "--out", str(tmp_path / "topics"))
    said = say(launcher, "check", str(lm_file), "--ranks", "1,4", "--steps", "4", "--out", str(tmp_path / "check"))
    assert said.count("the answer is the same within 1e-05 over 4 steps") == 1
