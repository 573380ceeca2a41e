"""The loop of single.py with paceline.run: python paced.py, or  paceline train paced.py parallel.ranks=2"""

import torch
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
x = torch.randn(512, 20)
dataset = TensorDataset(x, (x @ torch.randn(20) > 0).float())
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with paceline.run(overrides={"train.epochs": 5, "train.global_batch": 64}) as run:
    model, optimizer = run.prepare(model, optimizer)
    for inputs, labels in run.batches(dataset):
        losses = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], labels, reduction="sum")
        run.step(losses, len(labels))
