"""A model that trains in a moment, in place of the scripts that configurations belong to."""

import pytest

import paceline

OWN = """
import torch
from paceline import Workload

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


class Own(Workload):
    def model(self): return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    def data(self, split): return torch.utils.data.TensorDataset(X if split == "train" else X[:8])
    def loss(self, model, batch):
        (x,) = batch
        return ((model(x)[:, 0] - x.sum(1)) ** 2).sum(), len(x)
"""


SCRIPT = """
import torch
import paceline

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))

with paceline.run() as run:
    model, optimizer = run.prepare(torch.nn.Linear(6, 1))
    for (x,) in run.batches(torch.utils.data.TensorDataset(X)):
        run.step(((model(x)[:, 0] - x.sum(1)) ** 2).sum(), len(x))
"""
"""In place of the script that a command starts."""
SMALL = (
    *("train.steps=3", "train.global_batch=8", "parallel.ranks=1", "parallel.micro_batch=null", "cluster=local"),
    *("train.warmup_steps=null", "train.warmup=0.5", "parallel.threads=1", "parallel.device=cpu"),
)


@pytest.fixture
def trains(tmp_path):
    """Trains an adopted run file for three steps on one rank, with sizes that suit it; its spec and its result."""
    (tmp_path / "own.py").write_text(OWN)

    def train(run_file, *overrides):
        spec = paceline.load(run_file, [f"workload={tmp_path / 'own.py'}:Own", *SMALL, *overrides])
        return spec, paceline.train(spec, tmp_path / "runs", show=False)

    return train


@pytest.fixture
def trains_a_script(tmp_path):
    """The same, of a run file that names a script."""

    def train(run_file):
        spec = paceline.load(run_file, SMALL)
        script = tmp_path / spec.workload
        script.parent.mkdir(exist_ok=True)
        script.write_text(SCRIPT)
        return paceline.train(paceline.load(run_file, SMALL), tmp_path / "runs", show=False)

    return train
