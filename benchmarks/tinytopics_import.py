"""The same fit with one import changed: tinytopics and paceline.tinytopics, seconds of one core and final loss.

    pip install tinytopics
    python benchmarks/tinytopics_import.py --epochs 200

Both get the same counts after the same seed. Seconds are those that the process computed, after a fit of one epoch that
imports and compiles. The loss is that of the returned model over all counts, found here in float64 for both.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from time import process_time
from typing import Any

import numpy as np
import torch
from synthetic_counts import generate_synthetic_data, zipf_documents

PACKAGES = ("tinytopics", "paceline.tinytopics")
CPU = torch.device("cpu")


def problems() -> dict[str, tuple[Any, int]]:
    """Counts as tensors, and the number of topics: long documents, short ones, and sparse ones that resemble text."""
    long, _, _ = generate_synthetic_data(1000, 1000, 10, 65_536, seed=1, sparse=False)
    short, _, _ = generate_synthetic_data(1000, 1000, 10, 1000, seed=1, sparse=False)
    text, _, _ = zipf_documents(1000, 3000, 10, seed=1)
    rows = text.block(0, text.documents).values
    sparse = torch.sparse_csr_tensor(*(torch.from_numpy(part.astype(np.int64)) for part in rows.parts), (1000, 3000))
    dense = {"long documents": torch.from_numpy(long), "short documents": torch.from_numpy(short)}
    return {name: (X.float(), 10) for name, X in {**dense, "text": sparse.to_dense()}.items()}


def loss_of(model: Any, X: Any) -> float:
    L, F = model.get_normalized_L().double(), model.get_normalized_F().double()
    expected = L @ F
    return float((expected - X * expected.clamp_min(1e-30).log()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=200)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    for problem, (X, k) in problems().items():
        for package in PACKAGES:
            tt = import_module(package)
            tt.fit_model(X, k, num_epochs=1, device=CPU)
            tt.set_random_seed(42)
            began = process_time()
            model, _ = tt.fit_model(X, k, num_epochs=epochs, device=CPU)
            took = process_time() - began
            print(f"{problem:16} {package:20} {took:8.2f} s   loss {loss_of(model, X):,.1f}", flush=True)


if __name__ == "__main__":
    main()
