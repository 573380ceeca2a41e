"""Points inside and outside of a circle, on any number of ranks:  paceline train ddp_after.yaml parallel.ranks=2"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def points(count, seed):
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.square().sum(1) < 0.6).long())


def main(run):
    torch.manual_seed(0)
    train_set, test_set = points(1000, seed=1), points(203, seed=2)
    model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    model, optimizer = run.prepare(model, optimizer)
    for epoch in run.epochs():
        for x, y in run.batches(train_set):
            run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        found = run.evaluate(test_set, lambda x, y: {"right": (model(x).argmax(1) == y).sum(), "count": len(y)})
        if run.main:
            print(f"epoch {epoch}: accuracy {found['right']:.4f} of {found['n']}")


if __name__ == "__main__":
    with paceline.run("ddp_after.yaml") as run:
        main(run)
