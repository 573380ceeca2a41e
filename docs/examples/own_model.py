"""A workload of your own, complete: a small network that learns a curve from noisy points.

paceline train docs/examples/own_model.yaml
paceline train docs/examples/own_model.yaml parallel.ranks=2
paceline check docs/examples/own_model.yaml --ranks 1,2 --accumulate 1,4
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from paceline import Workload
from paceline.config import Section, field


class Network(Section):
    """The section `model:` of the run file. Unknown keys and values out of range are refused by name."""

    width: int = field(64, "features", "size of the hidden layers", gt=0)
    dropout: float = field(0.1, "probability", "dropout, drawn per sample", ge=0, lt=1)


class Curve(Section):
    """The section `data:` of the run file."""

    points: int = field(4096, "samples", "points to train on; an eighth as many are held out", ge=8)
    noise: float = field(0.1, "", "standard deviation of the noise", ge=0)


class Points:
    """One split. Every rank makes the same points: they depend on a fixed seed and on nothing else."""

    def __init__(self, n: int, noise: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 2, generator=draw) * 2 - 1
        clean = torch.sin(3 * self.x[:, :1]) * self.x[:, 1:]
        self.y = clean + noise * torch.randn(n, 1, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids))  # every point is the same amount of work

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[ids], self.y[ids], torch.from_numpy(keys)


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.dropout = dropout

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)  # float64 with train.precision=fp64
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(self._drop(x, keys, place=0)))
        return self.last(self._drop(x, keys, place=1))

    def _drop(self, x: Tensor, keys: Tensor, place: int) -> Tensor:
        """Dropout drawn from each sample's key: the mask does not depend on the rank the sample is on."""
        if not (self.training and self.dropout):
            return x
        feature = torch.arange(x.shape[1], device=x.device)
        noise = scramble(keys[:, None] + feature * 0x9E3779B1 + (place + 1) * 0x85EBCA77)
        return torch.where(noise < self.dropout * 2**32, 0.0, x / (1 - self.dropout))


def scramble(x: Tensor) -> Tensor:
    """A 32-bit hash of each element, in int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


class OwnModel(Workload):
    Model, Data = Network, Curve

    def model(self) -> nn.Module:
        return MLP(self.spec.model.width, self.spec.model.dropout)

    def data(self, split: str) -> Points:
        data = self.spec.data
        return Points(data.points, data.noise, seed=1) if split == "train" else Points(data.points // 8, 0.0, seed=2)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y, keys = batch
        return ((model(x, keys) - y) ** 2).sum(), len(y)
