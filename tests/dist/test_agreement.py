"""Nodes with different files, and ranks that do not hold the same: the run ends, and names rank and key."""

import os
import socket
import subprocess
import sys

import pytest

from disagreeing import FILES, ROWS, TABLE, TEXTS, TOPICS, TRAIN, TREES, write_files
from paceline import train
from paceline.config import build_spec
from paceline.errors import PacelineError
from paceline.runlog.run_dir import RunDir
from paceline.trainer import agreement
from results import expect_error

CASES = {
    "same": (TRAIN, {}, {}, ""),
    "train.lr": (TRAIN, {"run.yaml": FILES["run.yaml"].replace("0.01", "0.02")}, {}, "train.lr"),
    "imported code": (TRAIN, {"beside.py": "SCALE = 1.5\n"}, {}, "beside.py"),
    "rows": (TRAIN, ROWS, {}, "the samples"),
    "environment": (TRAIN, {}, {"MKL_CBWR": "COMPATIBLE"}, "MKL_CBWR"),
    "script": (("train", "script.yaml"), ROWS, {}, "the samples"),
    "trees": (TREES, TABLE, {}, "data"),
    "topics": (TOPICS, TEXTS, {}, "data.path"),
}


def start_nodes(tmp_path, verb, changes, variables):
    """Start a verb as two nodes would, each in its own folder, and return (exit code, output) of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank, (files, more) in enumerate([({}, {}), (changes, variables)]):
        folder = tmp_path / f"node{rank}"
        write_files(folder, files)
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": str(rank)}
        command = [sys.executable, "-m", "paceline", *verb, "--out", str(tmp_path / "runs"), "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env={**os.environ, **world, **meeting, **more}, **pipes))
    return [(process.wait(120), process.stdout.read()) for process in started]


@pytest.mark.parametrize("case", CASES)
def test_nodes_with_different_files_do_not_start(tmp_path, case):
    verb, changes, variables, key = CASES[case]
    ended = start_nodes(tmp_path, verb, changes, variables)
    codes, text = [code for code, _ in ended], "".join(output for _, output in ended)
    if not key:
        assert codes == [0, 0], text
        return
    assert codes == [2, 2], text
    assert f"ranks differ in {key}" in text
    assert "on rank 1" in text
    assert not list((tmp_path / "runs").glob("**/checkpoints/step-*"))


def test_another_version_on_one_rank_is_named(monkeypatch):
    def gather(mine):
        host, facts = mine
        return [mine, (host, facts), ("other", {**facts, "torch": "2.10.0"})]

    monkeypatch.setattr(agreement, "gather_objects", gather)
    with expect_error("conflict", "torch") as caught:
        agreement.check_ranks_agree(build_spec({"train": {"steps": 2}}), "data")
    assert "rank 2 (other)" in str(caught.value)


def test_other_weights_on_one_node_are_named(monkeypatch):
    def gather(mine):
        return [mine, ("other", {"model.init_from": "another"})]

    assert agreement.agree_on_digest("model.init_from", lambda: "some", 0) == "some"
    monkeypatch.setattr(agreement, "gather_objects", gather)
    with expect_error("conflict", "model.init_from"):
        agreement.agree_on_digest("model.init_from", lambda: "some", 0)


ODD = """
import os
from pathlib import Path
import numpy as np, torch
from paceline import Workload
from paceline.config import Section, field
from paceline.launch.environment import SINGLE_RANK, detect_rank

def rank(): return (detect_rank(os.environ) or SINGLE_RANK).rank

class Rows:
    "A data set of one's own, without a fingerprint."
    def __init__(self, n, shift=0.0, draws=False, hole=None):
        self.n, self.shift, self.draws, self.hole = n, shift, draws, hole
    def __len__(self): return self.n
    def __getitem__(self, i):
        row = torch.tensor([i, i % 3, i % 5, self.shift], dtype=torch.float32) / 10
        if i == self.hole: row[3] = float("nan")
        return row + float(np.random.default_rng().normal()) if self.draws else row

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
    def forward(self, x): return self.down(torch.tanh(self.up(self.norm(x))))

class Same(Workload):
    victim = -1
    shard_rules = {"up": "column", "down": "row"}
    def model(self):
        self.net = Net()
        return self.net
    def data(self, split): return Rows(40) if split == "train" else None
    def loss(self, model, x): return (model(x)[:, 0] - x[:, 0]).square().sum(), len(x)
    def on_step(self, step, values):
        if step == 3 and rank() == self.victim:
            weight = self.net.norm.weight.detach()
            (weight.to_local() if hasattr(weight, "to_local") else weight).view(torch.int32)[0] ^= 1

class Other(Same):
    def data(self, split): return Rows(40, shift=0.1 * (rank() == 1)) if split == "train" else None

class Drawn(Same):
    def data(self, split): return Rows(40, draws=True) if split == "train" else None

class Seeded(Same):
    def model(self):
        torch.manual_seed(rank())
        return super().model()

class Flipped(Same):
    victim = 1

class Table(Section):
    path: Path = field(Path("rows.csv"), "path", "where its rows are")

class Hole(Same):
    Data = Table
    def data(self, split): return Rows(40, hole=17) if split == "train" else None

class Loss(Same):
    def loss(self, model, x):
        total, count = super().loss(model, x)
        return total / (0.0 if rank() == 1 else 1.0), count
"""
ENDS = {
    "Same": ({}, None),
    "Other": ({}, ("conflict", "data", "on rank 1", 0)),
    "Drawn": ({}, ("conflict", "data", "on rank 1", 0)),
    "Seeded": ({}, ("conflict", "model", "rank 1", 0)),
    "Flipped": ({"ranks": 3}, ("replica-differs", "norm.weight", "rank 1 (", 2)),
    "Flipped of two": ({}, ("replica-differs", "norm.weight", "ranks 0 (", 2)),
    "Flipped in a copy": ({"ranks": 4, "strategy": "hsdp"}, ("replica-differs", "norm.weight", "ranks 1 (", 2)),
    "Flipped beside parts": ({"ranks": 3, "tensor": 3}, ("replica-differs", "norm.weight", "rank 1 (", 2)),
    "Hole": ({}, ("nonfinite", "data", "sample 17 of rows.csv has nan in column 3 (rank ", 2)),
    "Loss": ({}, ("nonfinite", "loss", "rank 1 (", 0)),
}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("row", ENDS)
def test_ranks_that_do_not_hold_the_same_end_the_run(tmp_path, row):
    parallel, ended = ENDS[row]
    (tmp_path / "odd.py").write_text(ODD)
    train_section = {"steps": 6, "global_batch": 12, "lr": 0.01, "checkpoint_every": 2}
    parallel = {"ranks": 2, "threads": 1, "device": "cpu", **parallel}
    workload = f"{tmp_path}/odd.py:{row.split()[0]}"
    spec = build_spec({"name": "odd", "workload": workload, "train": train_section, "parallel": parallel})
    if ended is None:
        assert train(spec, tmp_path, show=False).status == "finished"
        return
    code, key, text, step = ended
    with expect_error(code, key, PacelineError) as caught:
        train(spec, tmp_path, show=False)
    assert text in str(caught.value)
    sealed = [path.name for path in RunDir(tmp_path / "odd").checkpoints.glob("step-*")]
    assert max(sealed, default="step-00000000") == f"step-{step:08d}", "what is corrupt is not saved"
