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

from paceline.config.registry import describe_error, format_user_trace, load_user_function
from paceline.data.samples import as_samples
from paceline.errors import UserError
from paceline.workload import Samples

MAX_LINES = 3
"""Of what Keras says of shapes that do not fit: all that matters is in the first ones."""


@contextmanager
def guard_user_code(key: str, reference: str) -> Iterator[None]:
    """A call of the function `reference`, which the field `key` names."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = f"{key}: {reference} fails: {describe_error(error)}"
        raise UserError(f"{said}\n\n{format_user_trace(error, reference)}".rstrip()) from error


@contextmanager
def guard_model_call() -> Iterator[None]:
    """The model is called with the samples for the first time."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = " ".join(line.strip() for line in str(error).strip().splitlines()[:MAX_LINES])
        raise UserError(
            f"the model, its loss and its data do not fit together: {type(error).__name__}: {told}"
        ) from error


SOURCE_KEY = "data.source"
FINGERPRINT_SAMPLES = 32
"""Samples by which a data set is recognised again."""
FIRST_SAMPLE = np.zeros(1, np.int64)


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
    """Those of a split; None where there is none. `source` is a function of the split, or one that returns both."""
    if not source.rpartition(":")[0]:
        raise UserError(f"{SOURCE_KEY} is not given; write  data: file.py:function  for what returns (inputs, targets)")
    function = load_user_function(source, SOURCE_KEY)
    with guard_user_code(SOURCE_KEY, source):
        takes_split = bool(inspect.signature(function).parameters)
        found = function(split) if takes_split else _split_pair(function(), source)[split == "test"]
    said = f"{SOURCE_KEY}: {source.rpartition(':')[2]}({repr(split) if takes_split else ''})"
    if found is None:
        if split == "train":
            raise UserError(f"{said} returned None; there must be a sample to train on")
        return None
    samples = as_samples(found, None, said)
    if not len(samples):
        raise UserError(f"{said} has no samples for {split!r}; return None where there is no such split")
    first = samples.batch(FIRST_SAMPLE, FIRST_SAMPLE)
    if not isinstance(first, tuple | list) or len(first) not in (2, 3):
        raise UserError(f"{said} must hold (inputs, targets) or (inputs, targets, weights), as in  return x, y")
    return KeyedSamples(samples)


def _split_pair(found: Any, source: str) -> Any:
    """(train, test), as the functions of keras.datasets return them."""
    if isinstance(found, tuple | list) and len(found) == 2:
        return found
    raise UserError(
        f"{SOURCE_KEY}: {source} takes no split, and then returns both, as  return (x_train, y_train), (x_test, y_test)"
    )
