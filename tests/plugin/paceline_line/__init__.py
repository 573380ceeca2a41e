"""A straight line through noisy points, as a workload that an installed package brings."""

import numpy as np
import torch
from torch import nn

from paceline import Workload
from paceline.config import Section, field


class LineModel(Section):
    width: int = field(4, "features", "inputs of the line", gt=0)


class LineData(Section):
    points: int = field(256, "samples", "points to fit", gt=0)


class Points:
    def __init__(self, count: int, width: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.x = generator.standard_normal((count, width)).astype(np.float32)
        self.y = self.x.sum(1, keepdims=True) + 1

    def __len__(self) -> int:
        return len(self.x)

    def cost(self, ids):
        return np.ones(len(ids))

    def batch(self, ids, keys):
        return torch.from_numpy(self.x[ids]), torch.from_numpy(self.y[ids])


class Line(Workload):
    Model, Data = LineModel, LineData

    def model(self):
        return nn.Linear(self.spec.model.width, 1)

    def data(self, split):
        return Points(self.spec.data.points, self.spec.model.width, seed=0 if split == "train" else 1)

    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(y)
