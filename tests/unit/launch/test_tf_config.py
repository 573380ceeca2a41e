"""TF_CONFIG, as TensorFlow documents it; a plain program stands for a worker."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.launch.command import run_command_ranks

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
        out = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
        said.append([line.partition("step ")[2] for line in out.splitlines() if "step" in line])
    assert said[0] == said[1]
    assert len(said[0]) == 2
