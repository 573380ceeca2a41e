"""A workload that counts: its weights are how often each sample was trained on.

The loss of sample i is -w[i], so plain SGD at rate 1 adds exactly 1 to w[i] each time i is used. The counts are in the
checkpoint like any weights: what a kill undid is undone in them too.
"""

import torch
from pacing import crawl
from torch import nn

from paceline import Workload
from paceline.config import Section, field


class Model(Section):
    samples: int = field(101, "samples", "how many there are", gt=0)


class Numbers:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def cost(self, ids):
        return ids % 5 + 1

    def batch(self, ids, keys):
        return torch.from_numpy(ids)


class Counts(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, ids):
        return self.w[ids]


class Counting(Workload):
    Model = Model

    def model(self):
        return Counts(self.spec.model.samples)

    def data(self, split):
        return Numbers(self.spec.model.samples) if split == "train" else None

    def loss(self, model, batch):
        crawl()
        return -model(batch).sum(), 0  # a count of 0 is divided by 1: each use weighs the same, in a tail too
