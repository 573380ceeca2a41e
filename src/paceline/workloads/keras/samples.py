"""The samples of a Keras model: what a function of the user's returns, with a key for each of them."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.data.samples import as_samples
from paceline.errors import UserError
from paceline.registry import function_of
from paceline.workload import Samples
from paceline.workloads.keras.own_code import own_code

KEY = "data.source"
FEW = 32
"""Samples by which a data set is recognised again."""
NOTHING = np.zeros(1, np.int64)


class KeyedSamples:
    """Samples whose batches are ((inputs, targets), keys): Dropout is drawn from the keys."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.beside_the_loop = getattr(samples, "beside_the_loop", True)

    def __len__(self) -> int:
        return len(self.samples)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return self.samples.cost(ids)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> tuple[Any, Tensor]:
        return self.samples.batch(ids, keys), torch.from_numpy(keys)

    def fingerprint(self) -> str:
        ids = np.unique(np.linspace(0, len(self) - 1, FEW).astype(np.int64))
        digest = hashlib.sha256(str(len(self)).encode())
        for leaf in tree_leaves(self.samples.batch(ids, np.zeros_like(ids))):
            digest.update(str(leaf.shape).encode() + np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


def samples_from(source: str, split: str) -> KeyedSamples | None:
    """Those of a split; None where there is none. `source` is a function of the split, or one that returns both."""
    if not source.rpartition(":")[0]:
        raise UserError(f"{KEY} is not given; write  data: file.py:function  for what returns (inputs, targets)")
    function = function_of(source, KEY)
    with own_code(KEY, source):
        takes_split = bool(inspect.signature(function).parameters)
        found = function(split) if takes_split else _both(function(), source)[split == "test"]
    said = f"{KEY}: {source.rpartition(':')[2]}({repr(split) if takes_split else ''})"
    if found is None:
        if split == "train":
            raise UserError(f"{said} returned None; there must be a sample to train on")
        return None
    samples = as_samples(found, None, said)
    if not len(samples):
        raise UserError(f"{said} has no samples for {split!r}; return None where there is no such split")
    first = samples.batch(NOTHING, NOTHING)
    if not isinstance(first, tuple | list) or len(first) not in (2, 3):
        raise UserError(f"{said} must hold (inputs, targets) or (inputs, targets, weights), as in  return x, y")
    return KeyedSamples(samples)


def _both(found: Any, source: str) -> Any:
    """(train, test), as the functions of keras.datasets return them."""
    if isinstance(found, tuple | list) and len(found) == 2:
        return found
    raise UserError(
        f"{KEY}: {source} takes no split, and then returns both, as  return (x_train, y_train), (x_test, y_test)"
    )
