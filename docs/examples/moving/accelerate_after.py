"""Handwritten digits by a small network, in a loop of one's own."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import paceline


def main():
    torch.manual_seed(0)
    images, classes = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    train_set, test_set = Subset(digits, range(1500)), Subset(digits, range(1500, len(digits)))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with paceline.run("accelerate_after.yaml") as run:
        model, optimizer = run.prepare(model, optimizer)
        for x, y in run.batches(train_set):
            run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        metrics = run.evaluate(test_set, lambda x, y: {"accuracy": (model(x).argmax(1) == y).sum(), "count": len(y)})
        if run.main:
            print(f"accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
