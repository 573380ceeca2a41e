"""A workload of your own that can be used after its training: which points of a plane lie inside of a circle?

paceline train docs/examples/circle.yaml
paceline predict runs/circle docs/examples/points.csv
paceline export runs/circle --out circle --onnx
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline import Workload, class_sums
from paceline.config import Section, field


class Sizes(Section):
    width: int = field(32, "features", "size of the hidden layer", gt=0)


class Points(Section):
    points: int = field(2000, "samples", "points to train on; a fifth as many are held out", ge=10)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points):
        return self.layers(points)


class Circle(Workload):
    Model, Data = Sizes, Points
    score = "accuracy"

    def model(self):
        return Net(self.spec.model.width)

    def data(self, split):
        n, seed = (self.spec.data.points, 1) if split == "train" else (self.spec.data.points // 5, 2)
        points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
        return points, (points.norm(dim=1) > 1.2).long()

    def loss(self, model, batch):
        points, labels = batch
        return F.cross_entropy(model(points), labels, reduction="sum"), len(labels)

    def evaluate(self, model, batch):
        points, labels = batch
        logits = model(points)
        loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
        return {"loss": loss, "count": len(labels), **class_sums(logits, labels)}

    # what using the trained model takes

    def classes(self):
        return ("inside", "outside")

    def encode(self, inputs):
        """Rows of a table with the columns x and y, or pairs of numbers."""
        pairs = [(row["x"], row["y"]) if isinstance(row, dict) else row for row in inputs]
        return torch.tensor([[float(x), float(y)] for x, y in pairs])

    def predict(self, model, batch):
        return {"probabilities": model(batch).softmax(1)}
