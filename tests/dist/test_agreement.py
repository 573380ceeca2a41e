"""Nodes with different files: the run ends before the first step, and names rank and key."""

import os
import socket
import subprocess
import sys

import pytest

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.trainer import agreement

WORKLOAD = """
import csv, torch
from paceline import Workload
from beside import SCALE

class Line(Workload):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, split):
        rows = [[float(x) for x in row] for row in csv.reader(open("rows.csv"))]
        return torch.tensor(rows) if split == "train" else None

    def fingerprint(self):
        return open("rows.csv").read()

    def loss(self, model, batch):
        return ((SCALE * model(batch[:, :2])[:, 0] - batch[:, 2]) ** 2).sum(), len(batch)
"""
FILES = {
    "w.py": WORKLOAD,
    "beside.py": "SCALE = 1.0\n",
    "rows.csv": "".join(f"{i},{i % 3},{i % 5}\n" for i in range(16)),
    "run.yaml": "name: line\nworkload: w.py:Line\ntrain: {steps: 4, global_batch: 8, lr: 0.01}\n",
}
CASES = {
    "same": ({}, {}, ""),
    "train.lr": ({"run.yaml": FILES["run.yaml"].replace("0.01", "0.02")}, {}, "train.lr"),
    "train.seed": ({"run.yaml": FILES["run.yaml"].replace("lr:", "seed: 1, lr:")}, {}, "train.seed"),
    "train.steps": ({"run.yaml": FILES["run.yaml"].replace("steps: 4", "steps: 5")}, {}, "train.steps"),
    "code": ({"w.py": WORKLOAD + "\n# changed\n"}, {}, "w.py"),
    "imported code": ({"beside.py": "SCALE = 1.5\n"}, {}, "beside.py"),
    "rows": ({"rows.csv": FILES["rows.csv"].replace("7,1,2", "7,1,3")}, {}, "data"),
    "environment": ({}, {"MKL_CBWR": "COMPATIBLE"}, "MKL_CBWR"),
}


def start_nodes(tmp_path, changes, variables):
    """Start `paceline train` as two nodes would, each in its own folder, and return (exit code, output) of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank, (files, more) in enumerate([({}, {}), (changes, variables)]):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        for name, text in {**FILES, **files}.items():
            (folder / name).write_text(text)
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": str(rank)}
        command = [sys.executable, "-m", "paceline", "train", "run.yaml", "--out", str(tmp_path / "runs"), "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env={**os.environ, **world, **meeting, **more}, **pipes))
    return [(process.wait(120), process.stdout.read()) for process in started]


@pytest.mark.parametrize("case", CASES)
def test_nodes_with_different_files_do_not_start(tmp_path, case):
    changes, variables, key = CASES[case]
    ended = start_nodes(tmp_path, changes, variables)
    codes, text = [code for code, _ in ended], "".join(output for _, output in ended)
    if not key:
        assert codes == [0, 0], text
        return
    assert codes == [2, 2], text
    assert f"ranks differ in {key}: " in text
    assert "on rank 1" in text
    assert not list((tmp_path / "runs").glob("*/checkpoints/step-*"))


def test_another_version_on_one_rank_is_named(monkeypatch):
    def gather(mine):
        host, facts = mine
        return [mine, (host, facts), ("other", {**facts, "torch": "2.10.0"})]

    monkeypatch.setattr(agreement, "gather_objects", gather)
    with pytest.raises(UserError) as caught:
        agreement.check_ranks_agree(build_spec({"train": {"steps": 2}}), "data")
    assert (caught.value.code, caught.value.key) == ("conflict", "torch")
    assert "rank 2 (other)" in str(caught.value)
