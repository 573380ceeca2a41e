"""What `Workload.data(split)` may return, brought to one form: `Samples`.

A tuple or dict of tensors or arrays, a DataFrame or columns of it, a torch `Dataset` or anything else with a length and
items, a Hugging Face dataset, and of course `Samples`. What has no order of its own, a stream, is refused: no step
could be named twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.config.registry import Traits
from paceline.data.generators import find_seeders, preserve_generators, seed_generators
from paceline.errors import UserError
from paceline.workload import BaseWorkload, OwnLoop, Samples, Workload

ALLOWED = (
    "it may return a tuple or dict of tensors or arrays, a Dataset (an object with __len__ and __getitem__), or Samples"
)

FEW = 5
"""Samples that are looked at to learn whether all have one shape."""


def samples_of(workload: Workload, split: str = "train") -> Samples | None:
    """The samples of a split, whatever `data(split)` returned; None where there is no such split.

    While worker processes make the samples of a run, these are the ones.
    """
    return workload.served[split] if split in workload.served else load_samples(workload, split)


def load_training_samples(workload: Workload) -> Samples:
    """What there is to train on."""
    found = samples_of(workload)
    if found is None:
        raise UserError("workload: data('train') returned None; there must be a sample to train on")
    return found


def cost_of(samples: Samples, ids: np.ndarray) -> np.ndarray:
    """The work of each of these samples, as they say it."""
    found = np.asarray(samples.cost(ids))
    if found.shape != ids.shape or found.dtype.kind not in "biuf":
        raise UserError(
            f"workload: cost(ids) gave {_describe(found)} for {len(ids)} samples; it must give an array with a number "
            "for each of them, as in  return self.lengths[ids]"
        )
    return found


def count_samples(workload: BaseWorkload) -> int:
    """How many samples there are to learn from."""
    return len(load_training_samples(workload)) if isinstance(workload, Workload) else workload.sample_count()


def load_samples(workload: Workload, split: str) -> Samples | None:
    """What `data(split)` returns, as Samples."""
    found, said = workload.data(split), workload.data_words.format(split=split)
    if found is None:
        return None
    samples = as_samples(found, workload.collate, said)
    if not len(samples):
        if samples is found and split != "train":  # a corpus may be too small to hold a sample out
            return None
        what = "there must be a sample to train on" if split == "train" else "return None where there is no such split"
        raise UserError(f"{said} is empty; {what}")
    return samples


def traits_of(workload: Workload, samples: Samples) -> Traits:
    """What decides how its steps run (paceline.execution)."""
    return Traits(
        equal_layers=workload.compile_layers,
        few_shapes=hasattr(samples, "fixed_shape_batches") or _has_one_shape(samples),
        half_only=getattr(samples, "half_only", False),
        own_loop=isinstance(workload, OwnLoop),
        own_optimizer=workload.has("optimizer"),
    )


def _has_one_shape(samples: Samples) -> bool:
    """Whether samples all have the same shape, by the look of a few."""
    if hasattr(samples, "resident"):
        return True
    few = np.linspace(0, len(samples) - 1, min(len(samples), FEW)).astype(np.int64)
    shapes = {
        tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(samples.batch(ids, ids * 0)))
        for ids in few[:, None]
    }
    return len(shapes) == 1


def as_samples(found: Any, collate: Callable[[list[Any]], Any] | None, said: str) -> Samples:
    """What a user calls data, in the one form; `said` begins the sentence about what is wrong with it."""
    if all(hasattr(found, name) for name in ("__len__", "cost", "batch")):
        return found
    if type(found) is TensorDataset and collate is None:
        found = found.tensors
    if hasattr(found, "to_numpy") and hasattr(found, "columns"):  # a DataFrame
        found = {str(name): found[name] for name in found.columns}
    if isinstance(found, Tensor | np.ndarray | tuple) or type(found) is dict or hasattr(found, "to_numpy"):
        return ArraySamples(found, said)
    if isinstance(found, DataLoader):
        raise UserError(f"{said} returned a DataLoader; return its dataset: the run file says how batches are made")
    if isinstance(found, IterableDataset) or (hasattr(found, "__iter__") and not hasattr(found, "__getitem__")):
        raise UserError(
            f"{said} returned a stream, {type(found).__name__}, whose samples have no numbers: no run could be resumed "
            "or spread over ranks with each of them seen once; return list(stream) if it fits in memory, or write it "
            "to a file once and return a Dataset with __len__ and __getitem__"
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(found, name)]
    if missing or isinstance(found, str | bytes | Mapping):
        lacks = f", which has no {' and no '.join(missing)}" if missing else ""
        raise UserError(f"{said} returned {type(found).__name__}{lacks}; {ALLOWED}")
    own = collate or getattr(found, "collate", None)
    if own is None and type(found).__module__.partition(".")[0] == "datasets" and found.format["type"] is None:
        found = found.with_format("torch")
    return DatasetSamples(found, own, said)


class ArraySamples:
    """Tensors or arrays in which row i is sample i."""

    def __init__(self, columns: Any, said: str) -> None:
        columns = tree_map(_to_array, columns, is_leaf=_is_list)
        for path, leaf in tree_flatten_with_path(columns, is_leaf=_is_list)[0]:
            if isinstance(leaf, list):
                raise UserError(
                    f"{said}{keystr(path)} is a list; make an array of it with  np.array, or return a list of samples"
                )
            if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
                raise UserError(f"{said}{keystr(path)} is {_describe(leaf)}; {ALLOWED}")
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc":
                raise UserError(
                    f"{said}{keystr(path)} is {_describe(leaf)}; give words and dates numbers before they are data"
                )
        self.columns = tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else _to_tensor(leaf), columns)
        leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(self.columns)[0]]
        if not leaves:
            raise UserError(f"{said} is empty; {ALLOWED}")
        self.length = len(leaves[0][1])
        for name, leaf in leaves:
            if len(leaf) != self.length:
                raise UserError(
                    f"{said}{name} has {len(leaf)} rows and {said.partition(': ')[2]}{leaves[0][0]} {self.length}; "
                    "row i of each must be sample i"
                )

    def __len__(self) -> int:
        return self.length

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids))

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        rows = torch.from_numpy(ids)
        return tree_map(lambda column: column[rows], self.columns)

    def resident(self) -> Any:
        """All samples as tensors, row i being sample i, so that a small data set can live on its device."""
        return self.columns


class DatasetSamples:
    """A data set with a length and items. What an item draws at random follows from its key alone.

    It draws from the generators of the whole process: samples must not be made in a thread beside the model's own use
    of them, but in a process of their own, or between two steps.
    """

    beside_the_loop = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, said: str) -> None:
        self.dataset, self.collate, self.said = dataset, collate, said
        self.own_cost = getattr(dataset, "cost", None)
        self.seeders = find_seeders(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids)) if self.own_cost is None else self.own_cost(ids)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        with preserve_generators():
            samples = [self._sample(i, key) for i, key in zip(ids.tolist(), keys.tolist(), strict=True)]
            if self.collate is not None:
                return self.collate(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError):
            _reject_differing(samples, ids, self.said)
            raise

    def _sample(self, number: int, key: int) -> Any:
        seed_generators(key)
        for seed in self.seeders:
            seed(key)
        try:
            return self.dataset[number]
        except Exception as error:
            error.add_note(f"(sample {number} of {self.said.partition(': ')[2]})")
            raise


def _is_list(thing: Any) -> bool:
    return isinstance(thing, list)


def _to_array(column: Any) -> Any:
    """Of a column of a DataFrame, or several; anything else as it is."""
    return column.to_numpy() if hasattr(column, "to_numpy") else column


def _to_tensor(array: np.ndarray) -> Tensor:
    """Of the same memory, where torch can read it."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def _reject_differing(samples: Sequence[Any], ids: np.ndarray, said: str) -> None:
    """Say which two samples cannot be rows of one batch, or which part of one never can."""
    first = _describe_leaves(samples[0])
    for number, sample in zip(ids[1:].tolist(), samples[1:], strict=True):
        other = _describe_leaves(sample)
        for path in dict.fromkeys([*first, *other]):
            if first.get(path) != other.get(path):
                part = f" at {path}" if path else ""
                raise UserError(
                    f"{said}: sample {ids[0]} is {first.get(path, 'nothing')}{part} and sample {number} "
                    f"{other.get(path, 'nothing')}; make them alike in the data set, or give your Workload a method  "
                    "collate(self, samples)  that makes a batch of them"
                )
    for leaf in tree_leaves(samples[0]):
        if not isinstance(leaf, Tensor | np.ndarray | np.generic | int | float | str | bytes):
            raise UserError(
                f"{said}: sample {ids[0]} holds {_describe(leaf)}, which does not fit in a batch; make a tensor of it "
                "in the data set, or give your Workload a method  collate(self, samples)"
            )


def _describe_leaves(sample: Any) -> dict[str, str]:
    return {keystr(path): _describe(leaf) for path, leaf in tree_flatten_with_path(sample)[0]}


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(leaf, Tensor) else f"an array of {leaf.dtype}"
        return f"{kind} of shape {list(leaf.shape)}"
    if leaf is None:
        return "None"
    name = type(leaf).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
