"""Promise 3: no work is lost. Kills at random moments end in the same bits as a run that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from paceline import train
from paceline.record.events import read_events
from paceline.record.run_dir import RunDir
from paceline.training.run import RunResult, resume

KILLS = 10


@pytest.fixture
def long_spec(small):
    return small.replace(
        {"train.steps": 240, "train.checkpoint_every": 8, "train.evaluate_every": 60, "model.dropout": 0.1}
    )


def start(run, ranks):
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "--resume",
        str(run.path),
        f"parallel.ranks={ranks}",
        "--quiet",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def ranks_of(process, run):
    """Only those of this attempt: an earlier one's number may belong to somebody else by now."""
    pids = [list(read_events(file, "start"))[-1]["pid"] for file in run.events.iterdir()]
    return [pid for pid in pids if _group(pid) == process.pid]


def kill(process, run, target):
    """One rank, the launcher, or everything at once."""
    if target == "everything":
        os.killpg(process.pid, signal.SIGKILL)
    elif target == "launcher":
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.kill(random.choice(ranks_of(process, run)), signal.SIGKILL)


def wait_until(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
    return True


def gone(process):
    """All processes of a killed run have ended: nobody writes into its folder any more."""
    return not any(_group(p.pid) == process.pid and _lives(p) for p in psutil.process_iter())


def _lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return False


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_ten_kills_end_in_the_same_weights(long_spec, tmp_path):
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
        assert wait_until(lambda: events.exists() and events.stat().st_size > before + 600, process), "it trains"
        if kills % 2:
            assert wait_until(lambda: any(p.name.endswith(".writing") for p in run.checkpoints.iterdir()), process)
            during_checkpoint += 1
        else:
            time.sleep(random.uniform(0, 0.25))
        if process.poll() is not None:
            break
        kill(process, run, targets[kills % 3])
        kills += 1
        process.wait(timeout=30)
        assert wait_until(lambda: gone(process), start_nothing(), seconds=40)
    assert kills == KILLS, "the run must be long enough for all kills"
    result = resume(run.path, show=False)
    assert result.status == "finished"
    assert same_bits(alone, result)
    assert result.metrics == alone.metrics
    assert during_checkpoint >= 4


def start_nothing():
    """A process that outlives any wait."""

    class Alive:
        def poll(self):
            return None

    return Alive()


def same_bits(a: RunResult, b: RunResult) -> bool:
    ours, theirs = a.weights(), b.weights()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sigterm_stops_after_a_checkpoint_and_another_number_of_ranks_goes_on(long_spec, tmp_path):
    spec = long_spec.replace({"parallel.ranks": 2, "train.checkpoint_every": 1000})
    alone = train(spec, tmp_path / "alone", show=False)
    run = RunDir.claim(tmp_path / "stopped", "run", spec)
    process = start(run, ranks=2)
    events = run.events_file(0)
    assert wait_until(lambda: events.exists() and events.stat().st_size > 3000, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert [p.name for p in run.checkpoints.iterdir()], "it saved before it stopped"
    result = resume(run.path, ["parallel.ranks=1"], show=False)
    assert result.status == "finished"
    ours, theirs = alone.weights(), result.weights()
    for name in ours:
        assert torch.dist(ours[name], theirs[name]) <= 1e-3 * ours[name].norm() + 1e-4, name
