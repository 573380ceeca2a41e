"""Promise 3: no work is lost. Kills at random moments end in the same bits as a run that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ending import group_of, wait_until, wait_until_gone
from pacing import QUICK_PASSES

from paceline import RunResult, resume, train
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from results import assert_same_bits

pytestmark = pytest.mark.usefixtures("warm_ranks")  # but for those that are killed

HERE = Path(__file__).parent
KILLS = 6
"""Each of three targets once while a checkpoint is written and once at another moment."""


@pytest.fixture
def long_spec(small):
    changes = {"train.steps": 104, "train.checkpoint_every": 8, "train.evaluate_every": 52, "model.dropout": 0.1}
    quick = {"model.layers": 1, "train.global_batch": 8}
    return small.replace({**changes, **quick, "workload": f"{HERE / 'pacing.py'}:Paced"})


def start(run, ranks):
    command = [sys.executable, "-m", "paceline", "train", "--resume", str(run.path), f"parallel.ranks={ranks}"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen([*command, "--quiet"], **options, env={**os.environ, QUICK_PASSES: "10"})


def ranks_of(process, run):
    """Those of this attempt that have said so: an earlier one's number may belong to somebody else by now."""
    pids = [start["pid"] for file in run.events.iterdir() for start in list(read_events(file, "start"))[-1:]]
    return [pid for pid in pids if group_of(pid) == process.pid]


def kill(process, run, target):
    if target == "everything":
        os.killpg(process.pid, signal.SIGKILL)
    elif target == "launcher":
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.kill(random.choice(ranks_of(process, run)), signal.SIGKILL)


def test_kills_end_in_the_same_weights(long_spec, tmp_path):
    random.seed(7)
    spec = long_spec.replace({"parallel.ranks": 2})
    alone = train(spec, tmp_path / "alone", show=False)
    run = RunDir.claim(tmp_path / "killed", "run", spec)
    events = run.events_file(0)
    targets = ["rank", "launcher", "everything"]
    kills = during_checkpoint = 0
    while kills < KILLS:
        before = events.stat().st_size if events.exists() else 0
        process = start(run, ranks=2)
        assert wait_until(lambda: events.exists() and events.stat().st_size > before + 600, process), "it trains"  # noqa: B023 - called at once
        assert wait_until(lambda: len(ranks_of(process, run)) == 2, process), "both ranks do"  # noqa: B023
        if kills % 2:
            assert wait_until(lambda: any(run.checkpoints.glob("*.writing")), process, look_every_s=0.002)
            during_checkpoint += 1
        else:
            time.sleep(random.uniform(0, 0.25))
        assert process.poll() is None, "the run must be long enough for all kills"
        kill(process, run, targets[kills % 3])
        kills += 1
        process.wait(timeout=120)
        wait_until_gone(process.pid)
    result = resume(run.path, show=False)
    assert result.status == "finished"
    assert_same_bits(alone, result)
    assert result.metrics == alone.metrics
    assert during_checkpoint == KILLS // 2


def test_sigterm_stops_after_a_checkpoint_and_another_number_of_ranks_goes_on(long_spec, tmp_path):
    spec = long_spec.replace({"parallel.ranks": 2, "train.steps": 40, "train.checkpoint_every": 1000})
    alone = train(spec, tmp_path / "alone", show=False)
    run = RunDir.claim(tmp_path / "stopped", "run", spec)
    process = start(run, ranks=2)
    events = run.events_file(0)
    assert wait_until(lambda: events.exists() and len(read_steps(events)) > 5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    assert [p.name for p in run.checkpoints.iterdir()], "it saved before it stopped"
    assert len(read_steps(events)) < spec.train.steps
    result = resume(run.path, ["parallel.ranks=1"], show=False)
    assert result.status == "finished"
    ours, theirs = alone.weights(), result.weights()
    for name in ours:
        assert torch.dist(ours[name], theirs[name]) <= 1e-3 * ours[name].norm() + 1e-4, name


def test_a_run_that_loses_a_rank_goes_on_with_the_others(long_spec, tmp_path):
    spec = long_spec.replace({"parallel.ranks": 3, "parallel.least_ranks": 2, "train.steps": 64})
    alone = train(spec, tmp_path / "alone", show=False)
    run = RunDir.claim(tmp_path / "shrunk", "run", spec)
    process, events = start(run, ranks=3), run.events_file(0)
    assert wait_until(lambda: events.exists() and len(read_steps(events)) > 12, process)
    assert wait_until(lambda: len(ranks_of(process, run)) == 3, process)
    killed_s = time.time()
    os.kill(ranks_of(process, run)[1], signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert run.spec().parallel.ranks == 2
    (again,) = read_events(events, "resume")
    assert again["t"] - killed_s < spec.parallel.timeout_s, "nobody waited for the dead rank"
    assert [step["step"] for step in read_steps(events)] == list(range(1, 65))
    ours, theirs = (RunResult(path, None).weights() for path in (alone.path, run.path))
    assert all(torch.dist(ours[n], theirs[n]) <= 1e-3 * ours[n].norm() + 1e-4 for n in ours)
