"""Small scripts with a loop of their own, for the tests of `paceline.run`."""

import gzip
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunSpec, build_spec

HEAD = """
import random, sys
import torch
import torch.nn.functional as F
from torch import nn
import paceline


class Noisy(torch.utils.data.Dataset):
    def __init__(self, count=53):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        self.y = (self.x[:, :3].sum(1) > 0).long()

    def __len__(self): return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6) + 0.01 * random.random(), self.y[i]


def sums(x, y):
    scores = model(x)
    return {"loss": F.cross_entropy(scores, y, reduction="sum"), "accuracy": (scores.argmax(1) == y).sum(),
            "count": len(y)}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 3e-3}]
optimizer = torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5)
train_set, test_set = Noisy(), Noisy(29)
test_set = torch.utils.data.TensorDataset(test_set.x, test_set.y)
"""
LOOP = """
with paceline.run() as run:
    model, optimizer = run.prepare(model, optimizer)
    for x, y in run.batches(train_set):
        run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))
    run.evaluate(test_set, sums)
"""


def script(folder: Path, loop: str = LOOP, head: str = HEAD) -> Path:
    file = folder / "train.py"
    file.write_text(head + textwrap.dedent(loop), encoding="utf-8")
    return file


def script_spec(file: Path, **sections: Any) -> RunSpec:
    """A short run of a script, whose steps depend on all that the run file has."""
    values: dict[str, Any] = {
        "name": "script",
        "workload": str(file),
        "data": {"workers": 0, **sections.get("data", {})},
        "train": {"steps": 8, "global_batch": 16, "checkpoint_every": 3, **sections.get("train", {})},
        "parallel": {"threads": 1, **sections.get("parallel", {})},
    }
    return build_spec(values)


def write_digits(folder: Path, train: int = 203, test: int = 61) -> None:
    """Files under the names of MNIST: blocks of light whose place is the class."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        labels = draw.integers(0, 10, count).astype(np.uint8)
        images = draw.integers(0, 40, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 4 * (label // 2) :, 4 + 10 * (label % 2) :][:4, :8] = 250
        for kind, array in ((f"{name}-images.idx3-ubyte", images), (f"{name}-labels.idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{kind}.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))
