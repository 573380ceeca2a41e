"""The Poisson negative log-likelihood, without the term that depends on the counts alone."""

from __future__ import annotations

from torch import Tensor

LEAST = 1e-10  # of an expectation whose logarithm is taken


def poisson_nmf_loss(X: Tensor, X_reconstructed: Tensor) -> Tensor:
    """The sum over all counts of  p - x log p,  for counts x with expectations p; a tensor of one number."""
    log = X_reconstructed.clamp(min=LEAST).log()
    return (X_reconstructed - X * log).sum()
