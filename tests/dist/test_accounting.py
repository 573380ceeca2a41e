"""Promise 2: every sample counts exactly once per epoch, on any number of ranks and across a stop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ending import wait_until, wait_until_gone
from pacing import QUICK_PASSES

from paceline import load, resume, train
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("warm_ranks")

HERE = Path(__file__).parent
RUN = """
workload: {here}/counting.py:Counting
model: {{samples: 101}}
train: {{epochs: 3, global_batch: 10, optimizer: sgd, lr: 1, momentum: 0, schedule: constant, warmup: 0, clip: 0,
        weight_decay: 0, checkpoint_every: 3}}
parallel: {{threads: 1}}
"""


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "count.yaml"
    file.write_text(RUN.format(here=HERE))
    return file


def counts(result):
    return result.weights()["w"].round(decimals=4).tolist()


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 3), (2, "null"), (3, 2)])
def test_three_epochs_use_every_sample_three_times(run_file, tmp_path, ranks, micro_batch):
    spec = load(run_file, [f"parallel.ranks={ranks}", f"parallel.micro_batch={micro_batch}"])
    result = train(spec, tmp_path / "runs", show=False)
    assert counts(result) == [3.0] * 101
    assert result.summary.trained.samples == 303


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 1)])
def test_a_kill_and_a_resume_on_another_number_of_ranks_lose_and_repeat_nothing(run_file, tmp_path, first, then):
    arguments = [str(run_file), f"parallel.ranks={first}", "--out", str(tmp_path / "runs")]
    slowly = {**os.environ, "PYTHONPATH": str(HERE), QUICK_PASSES: "10"}
    command = [sys.executable, "-m", "paceline", "train", *arguments]
    process = subprocess.Popen(command, start_new_session=True, env=slowly)
    run = RunDir(tmp_path / "runs" / "run")
    assert wait_until(lambda: any(e["step"] == 9 for e in read_events(run.events_file(0), "checkpoint")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(process.pid)
    result = resume(run.path, [f"parallel.ranks={then}"], show=False)
    assert counts(result) == [3.0] * 101
    steps = [e["step"] for e in read_events(run.events_file(0), "resume")]
    assert steps, "the second attempt began at a checkpoint, not at the start"
    assert 0 < steps[0] < 33
