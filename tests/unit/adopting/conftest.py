"""A model that trains in a moment, in place of the scripts that configurations belong to."""

import pytest

import paceline

OWN = """
import torch
from paceline import Workload

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


class Own(Workload):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def data(self, split):
        return torch.utils.data.TensorDataset(X if split == "train" else X[:8])

    def loss(self, model, batch):
        (x,) = batch
        return ((model(x)[:, 0] - x.sum(1)) ** 2).sum(), len(x)
"""


@pytest.fixture
def trains(tmp_path):
    """Trains an adopted run file for three steps on one rank, with sizes that suit it; its spec and its result."""
    (tmp_path / "own.py").write_text(OWN)

    def train(run_file, *overrides):
        small = [
            "train.steps=3",
            "train.global_batch=8",
            "parallel.ranks=1",
            "parallel.micro_batch=null",
            "cluster=local",
        ]
        small += ["train.warmup_steps=null", "train.warmup=0.5", "parallel.threads=1", "parallel.device=cpu"]
        spec = paceline.load(run_file, [f"workload={tmp_path / 'own.py'}:Own", *small, *overrides])
        return spec, paceline.train(spec, tmp_path / "runs", show=False)

    return train
