"""Worker processes: the same answer with any number of them, and plain words when one ends badly."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ending import alive, wait_until

from paceline import train
from paceline.config import build_spec
from paceline.errors import RunFailed
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer.run import build_resumed_spec

pytestmark = pytest.mark.usefixtures("warm_ranks")

FILE = Path(__file__).with_name("noisy_data.py")


def spec_of(**data):
    return build_spec(
        {
            "workload": f"{FILE}:NoisyData",
            "data": data,
            "train": {"steps": 9, "global_batch": 8, "lr": 1e-2, "checkpoint_every": 3, "log_every": 1},
            "parallel": {"threads": 1, "timeout_s": 120},
        }
    )


def losses(run, kind="step"):
    return {event["step"]: event["loss"] for event in read_events(RunDir(run.path).events_file(0), kind)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(spec_of(workers=0), tmp_path_factory.mktemp("alone"), show=False)


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (3, 1), (0, 2), (2, 2), ("auto", 1)])
def test_the_answer_does_not_depend_on_who_makes_the_samples(workers, ranks, alone, tmp_path):
    run = train(spec_of(workers=workers).replace({"parallel.ranks": ranks}), tmp_path, show=False)
    for kind in ("step", "evaluate"):
        expected = losses(alone, kind)
        assert losses(run, kind) == (expected if ranks == 1 else pytest.approx(expected, rel=2e-6))
    started = next(read_events(RunDir(run.path).events_file(0), "start"))
    few = range(1, len(os.sched_getaffinity(0)) + 1)  # on a busy machine samples take longer, and more of them pay
    assert started["workers"] in (few if workers == "auto" else [workers])


def test_a_killed_worker_is_named_and_the_run_resumes(alone, tmp_path):
    notes = tmp_path / "notes"
    spec = spec_of(workers=2, kills_at=40, notes=str(notes))
    with pytest.raises(RunFailed, match=rf"(?s)SIGKILL.*--resume {tmp_path}/\w+") as failed:
        train(spec, tmp_path)
    assert re.match(r"data worker \d \(pid \d+\) .* step \d\n", str(failed.value))
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    run = train(build_resumed_spec(folder, {"data.workers": 1}), resume=folder, show=False)
    assert losses(run) == losses(alone)


def test_a_worker_that_raises_shows_the_users_traceback(tmp_path):
    with pytest.raises(RunFailed) as failed:
        train(spec_of(workers=1, fails_at=17), tmp_path, show=False)
    said = str(failed.value)
    assert said.startswith("the workload failed in a data worker: ValueError: this sample cannot be read\n\nTraceback")
    assert 'noisy_data.py", line' in said
    assert said.endswith("(sample 17 of data('train'))")
    assert "paceline/data" not in said


def test_workers_do_not_outlive_a_rank_that_is_killed(tmp_path):
    notes = tmp_path / "notes"
    file = tmp_path / "run.yaml"
    file.write_text(
        f"workload: {FILE}:NoisyData\ndata: {{workers: 2, sleeps_s: 0.02, notes: {notes}}}\n"
        "train: {steps: 1000, global_batch: 8}\n"
    )
    command = [sys.executable, "-m", "paceline", "train", str(file), "--out", str(tmp_path / "runs")]
    rank = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(pids(notes)) == 2, rank)
        workers = pids(notes)
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    assert wait_until(lambda: not any(map(alive, workers)))


def pids(notes):
    return {int(line) for line in notes.read_text().split()} if notes.exists() else set()
