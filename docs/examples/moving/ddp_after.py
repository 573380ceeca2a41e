"""Points inside and outside of a circle, on any number of ranks:  paceline train ddp_after.yaml parallel.ranks=2"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
        model.train()
        for x, y in run.batches(train_set):
            run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        model.eval()
        right = torch.zeros(2, device=run.device)
        with torch.no_grad():
            for x, y in DataLoader(run.share(test_set), batch_size=64):
                right[0] += (model(x.to(run.device)).argmax(1) == y.to(run.device)).sum()
                right[1] += len(y)
        sums = run.total(right=right[0], count=right[1])
        if run.main:
            print(f"epoch {epoch}: accuracy {sums['right'] / sums['count']:.4f} of {sums['count']:.0f}")


if __name__ == "__main__":
    with paceline.run("ddp_after.yaml") as run:
        main(run)
