"""y = w0·x0 + w1·x1 + w2·x2 on three ranks, each of which holds one weight: stages small enough to see all of them.

paceline check docs/examples/three_stages.yaml --layouts single,pipeline:3
"""

import torch
from torch import Tensor, nn

from paceline import Workload

X = torch.randn(96, 3, generator=torch.Generator().manual_seed(0))
WANTED = torch.tensor([2.0, -1.0, 0.5])


class Term(nn.Module):
    """Adds its product to the sum that arrives: what a rank computes, and sends to the next."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.w = number, nn.Parameter(torch.zeros(1))

    def forward(self, sum_B: Tensor, x_B3: Tensor) -> Tensor:
        return sum_B + self.w * x_B3[:, self.number]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(number) for number in range(3))

    def forward(self, x_B3: Tensor) -> Tensor:
        y_B = torch.zeros_like(x_B3[:, 0])
        for term in self.terms:
            y_B = term(y_B, x_B3)
        return y_B


class ThreeStages(Workload):
    def model(self) -> nn.Module:
        return Sum()

    def data(self, split: str) -> Tensor:
        return X[:72] if split == "train" else X[72:]

    def loss(self, model: nn.Module, x_B3: Tensor) -> tuple[Tensor, int]:
        return ((model(x_B3) - x_B3 @ WANTED) ** 2).sum(), len(x_B3)
