"""Call the user's functions of a Keras run and bring their samples to one form."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.config.registry import guard_user_code, load_user_function
from paceline.data.samples import as_samples
from paceline.errors import UserError
from paceline.workload import Samples

SOURCE_KEY = "data.source"
FINGERPRINT_SAMPLES = 32
FIRST_SAMPLE = np.zeros(1, np.int64)


@contextmanager
def guard_model_call() -> Iterator[None]:
    """Translate errors of the first call of the model with its samples, of which the first lines matter."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
        message = f"model, loss and data do not fit together: {type(error).__name__}: {reason}"
        raise UserError(message, code="invalid-workload") from error


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
        ids = np.unique(np.linspace(0, len(self) - 1, FINGERPRINT_SAMPLES).astype(np.int64))
        digest = hashlib.sha256(str(len(self)).encode())
        for leaf in tree_leaves(self.samples.batch(ids, np.zeros_like(ids))):
            digest.update(str(leaf.shape).encode() + np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


def load_keras_samples(source: str, split: str) -> KeyedSamples | None:
    """Load a split; None if it does not exist. `source` is a function of the split, or one that returns both."""
    if not source.rpartition(":")[0]:
        hint = "write  data: file.py:function  for what returns (inputs, targets)"
        raise UserError(f"{SOURCE_KEY} is not given; {hint}", code="missing-value", key=SOURCE_KEY)
    function = load_user_function(source, SOURCE_KEY)
    with guard_user_code(SOURCE_KEY, source):
        takes_split = bool(inspect.signature(function).parameters)
        found = function(split) if takes_split else function()
    call = f"{SOURCE_KEY}: {source.rpartition(':')[2]}({repr(split) if takes_split else ''})"
    if not takes_split:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise _source_error(f"{call} must return both splits:  return (x_train, y_train), (x_test, y_test)")
        found = found[split == "test"]
    if found is None and split != "train":
        return None
    samples = None if found is None else as_samples(found, None, call)
    if samples is None or not len(samples):
        raise _source_error(f"{call} has no samples for {split!r}")
    first = samples.batch(FIRST_SAMPLE, FIRST_SAMPLE)
    if not isinstance(first, tuple | list) or len(first) not in (2, 3):
        raise _source_error(f"{call} must return (inputs, targets) or (inputs, targets, weights)")
    return KeyedSamples(samples)


def _source_error(message: str) -> UserError:
    return UserError(message, code="invalid-workload", key=SOURCE_KEY)
