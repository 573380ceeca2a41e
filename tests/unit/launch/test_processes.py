"""Processes of ranks: the cores that they keep to, how they exit, and TF_CONFIG as TensorFlow documents it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.launch.command import run_command_ranks
from paceline.launch.environment import SINGLE_RANK, pin_cores

CORES = sorted(os.sched_getaffinity(0))


def seen(ranks, rank, threads):
    with pin_cores(replace(SINGLE_RANK, rank=rank, world=ranks, local_rank=rank, local_world=ranks), threads):
        found = sorted(os.sched_getaffinity(0))
    assert sorted(os.sched_getaffinity(0)) == CORES
    return found


@pytest.mark.skipif(len(CORES) == 1, reason="one core cannot be divided")
def test_ranks_that_take_all_cores_have_each_its_share():
    assert [seen(len(CORES), rank, 1) for rank in range(len(CORES))] == [[core] for core in CORES]
    if len(CORES) % 2 == 0:
        half = len(CORES) // 2
        assert seen(2, 0, half) + seen(2, 1, half) == CORES


@pytest.mark.parametrize(("ranks", "threads"), [(1, len(CORES)), (len(CORES) + 1, 1), (2, len(CORES)), (1, 1)])
def test_others_keep_all(ranks, threads):
    assert seen(ranks, 0, threads) == CORES


def test_cores_are_given_back_after_a_failure():
    place = replace(SINGLE_RANK, world=2, local_world=2)
    with pytest.raises(ZeroDivisionError), pin_cores(place, len(CORES) // 2):
        raise ZeroDivisionError
    assert sorted(os.sched_getaffinity(0)) == CORES


RANK = """
import atexit, os, signal, threading, time
import torch
from paceline.launch.signals import exit_rank

def compute():  # a thread that is in torch when the interpreter ends makes it abort
    a = torch.ones(300, 300)
    while True:
        a @ a

threading.Thread(target=compute, daemon=True).start()
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread")), daemon=False).start()
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGUSR1), print("an exit function")))
exit_rank(3)
"""


def test_threads_end_exit_functions_run_and_late_signals_are_ignored():
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["a thread", "an exit function", ""]


EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "tensorflow_workers.py"
WORKER = """
import json, os, pathlib, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(os.environ["TF_CONFIG"])
"""


def test_every_rank_is_a_worker_with_a_port_it_can_listen_on(tmp_path):
    environ = {**os.environ, "TF_CONFIG": "of another job"}
    assert run_command_ranks([sys.executable, "-S", "-c", WORKER, str(tmp_path)], 3, environ) == 0
    configs = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    workers = configs[0]["cluster"]["worker"]
    assert len(set(workers)) == 3
    assert configs == [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}} for rank in range(3)]


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_two_workers_of_tensorflow_find_the_losses_of_one():
    said = []
    for ranks in ("1", "2"):
        words = ["-m", "paceline", "launch", "--ranks", ranks, "--", sys.executable, str(EXAMPLE)]
        out = subprocess.check_output([sys.executable, *words], text=True)
        said.append([line.partition("step ")[2] for line in out.splitlines() if "step" in line])
    assert said[0] == said[1]
    assert len(said[0]) == 2
