"""Handwritten digits by a small network, as a workload."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from paceline import Workload


def digits(split):
    images, classes = load_digits(return_X_y=True)
    all_digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    return Subset(all_digits, range(1500) if split == "train" else range(1500, len(all_digits)))


class Digits(Workload):
    score = "accuracy"

    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, split):
        return digits(split)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).sum(), "count": len(y)}
