"""Who earns more than 50K: a table of numbers and categories, embeddings and a small network."""

import csv
import gzip

import torch
import torch.nn.functional as F
from torch import nn

from paceline import Workload

NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
CATEGORIES = ["workclass", "marital_status", "occupation", "relationship", "sex"]


def read(split):
    with gzip.open(f"data/adult_census/adult_{split}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def tensors(split):
    known = read("train")
    words = {name: sorted({row[name] for row in known}) for name in CATEGORIES}
    rows = known if split == "train" else read(split)
    numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
    codes = torch.tensor([[words[name].index(row[name]) for name in CATEGORIES] for row in rows])
    return numbers.log1p(), codes, torch.tensor([row["income"] == ">50K" for row in rows]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(32, 8) for _ in CATEGORIES)
        self.layers = nn.Sequential(nn.Linear(len(NUMBERS) + 8 * len(CATEGORIES), 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, numbers, codes):
        words = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *words], 1))


class Census(Workload):
    model = Net
    score = "accuracy"

    def data(self, split):
        return tensors(split)

    def loss(self, model, batch):
        numbers, codes, y = batch
        return F.cross_entropy(model(numbers, codes), y, reduction="sum"), len(y)

    def evaluate(self, model, batch):
        numbers, codes, y = batch
        return {"accuracy": (model(numbers, codes).argmax(1) == y).sum(), "count": len(y)}
