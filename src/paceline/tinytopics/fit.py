"""A fit in this process, on one device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from paceline.tinytopics.epochs import Epochs, FitRequest
from paceline.tinytopics.models import NeuralPoissonNMF


def fit_model(
    X: Tensor | Dataset,
    k: int,
    num_epochs: int = 200,
    batch_size: int = 16,
    base_lr: float = 0.01,
    max_lr: float = 0.05,
    T_0: int = 20,
    T_mult: int = 1,
    weight_decay: float = 1e-5,
    device: torch.device | None = None,
) -> tuple[NeuralPoissonNMF, list[float]]:
    """(model, loss of every epoch) of k topics in X: a tensor (documents, terms), or a dataset of its rows.

    An epoch is a pass over all documents, and `num_epochs` the most of them: a fit that has converged stops, and its
    loss is repeated for those that are left. Losses are sums over `batch_size` documents, on average; the fit does not
    depend on it. The other numbers are those of an optimiser that is not used here, and have no effect. Without a
    `device` it is the GPU, if there is one.
    """
    request = FitRequest(X, k, num_epochs, batch_size)
    request.check(base_lr=base_lr, max_lr=max_lr, T_0=T_0, T_mult=T_mult, weight_decay=weight_decay)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tqdm(total=num_epochs, desc="Training Progress") as bar:

        def seen(epoch: int, loss: float) -> None:
            bar.set_postfix({"Loss": f"{loss:.4f}"})
            bar.update(epoch - bar.n)

        model, losses = Epochs(request, where).run(seen)
        if bar.n < num_epochs:
            bar.set_postfix_str(f"Loss={losses[-1]:.4f}, converged after {bar.n} epochs")
            bar.update(num_epochs - bar.n)
    return model, losses
