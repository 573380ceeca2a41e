"""The factors of a fit as a module of logits, whose softmax are mixtures and topics; and the loss."""

import torch
from torch import Tensor, nn

MAX_FIRST_LOGIT = 0.1  # before a fit
MIN_EXPECTATION = 1e-10  # of which a logarithm is taken


class NeuralPoissonNMF(nn.Module):
    """L, the topics of n documents, and F, the m terms of k topics, as logits of rows that sum to one."""

    def __init__(self, n: int, m: int, k: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu" if device is None else device)
        self.L = nn.Embedding(n, k, device=self.device)
        self.F = nn.Parameter(torch.empty(k, m, device=self.device))
        for logits in (self.L.weight, self.F):
            nn.init.uniform_(logits, 0.0, MAX_FIRST_LOGIT)

    def forward(self, doc_indices: Tensor) -> Tensor:
        """Return the term distributions (documents, m) of these documents."""
        return self.L(doc_indices).softmax(dim=1) @ self.F.softmax(dim=1)

    @torch.no_grad()
    def get_normalized_L(self) -> Tensor:
        """Return the share of each topic in each document, (n, k), on the CPU."""
        return self.L.weight.softmax(dim=1).cpu()

    @torch.no_grad()
    def get_normalized_F(self) -> Tensor:
        """Return the probability of each term in each topic, (k, m), on the CPU."""
        return self.F.softmax(dim=1).cpu()

    @torch.no_grad()
    def take(self, L: Tensor, F: Tensor) -> None:
        """Set the factors: rows above zero that sum to one."""
        self.L.weight.copy_(L.log())
        self.F.copy_(F.log())


def poisson_nmf_loss(X: Tensor, X_reconstructed: Tensor) -> Tensor:
    """Return the sum of p - x log p over all counts x with expectations p."""
    log = X_reconstructed.clamp(min=MIN_EXPECTATION).log()
    return (X_reconstructed - X * log).sum()
