"""The factors of a fit as a module: logits, whose softmax are the mixtures of documents and the topics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST_FIRST = 0.1  # of the logits before a fit


class NeuralPoissonNMF(nn.Module):
    """L, the topics of n documents, and F, the m terms of k topics. Rows of both sum to one after the softmax."""

    def __init__(self, n: int, m: int, k: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu" if device is None else device)
        self.L = nn.Embedding(n, k, device=self.device)
        self.F = nn.Parameter(torch.empty(k, m, device=self.device))
        for logits in (self.L.weight, self.F):
            nn.init.uniform_(logits, 0.0, LARGEST_FIRST)

    def forward(self, doc_indices: Tensor) -> Tensor:
        """The term distributions (documents, m) of these documents."""
        return self.L(doc_indices).softmax(dim=1) @ self.F.softmax(dim=1)

    @torch.no_grad()
    def get_normalized_L(self) -> Tensor:
        """The share of each topic in each document, (n, k), on the CPU."""
        return self.L.weight.softmax(dim=1).cpu()

    @torch.no_grad()
    def get_normalized_F(self) -> Tensor:
        """The probability of each term in each topic, (k, m), on the CPU."""
        return self.F.softmax(dim=1).cpu()

    @torch.no_grad()
    def take(self, L: Tensor, F: Tensor) -> None:
        """Become the model of these factors: rows above zero that sum to one."""
        self.L.weight.copy_(L.log())
        self.F.copy_(F.log())
