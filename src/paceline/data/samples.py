"""Bring what `Workload.data(split)` returns to one form, `Samples`.

It may be a tuple or dict of tensors or arrays, a DataFrame, anything with a length and items, or a stream of known
length, whose samples are numbered as they come.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.config.registry import Traits
from paceline.errors import UserError
from paceline.workload import BaseWorkload, OwnLoop, Samples, Workload

ALLOWED = "return a tuple or dict of tensors or arrays, an object with __len__ and __getitem__, or Samples"
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
HOLDS_NONE = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType)
MAX_MEMBERS = 64  # of a list or dict in which a generator is searched: transforms, not samples
MAX_VISITED = 10_000
EMPTY = CellType()

Seed = Callable[[int], object]
RECENT = 1 << 14  # samples of a stream that are kept; a larger global batch reads it from its start again
SHAPE_SAMPLES = 5  # samples by which it is decided whether all have one shape


def samples_of(workload: Workload, split: str = "train") -> Samples | None:
    """Return the samples of a split, those of the worker processes if there are some; None without such a split."""
    return workload.served[split] if split in workload.served else load_samples(workload, split)


def load_training_samples(workload: Workload) -> Samples:
    if (samples := samples_of(workload)) is None:
        raise _data_error("workload: data('train') returned None; there must be a sample to train on")
    return samples


def cost_of(samples: Samples, ids: np.ndarray) -> np.ndarray:
    cost = np.asarray(samples.cost(ids))
    if cost.shape != ids.shape or cost.dtype.kind not in "biuf":
        raise _data_error(f"workload: cost(ids) gave {_describe_leaf(cost)}, expected a number for each sample")
    return cost


def count_samples(workload: BaseWorkload) -> int:
    return len(load_training_samples(workload)) if isinstance(workload, Workload) else workload.sample_count()


def load_samples(workload: Workload, split: str) -> Samples | None:
    found, source = workload.data(split), workload.data_words.format(split=split)
    if found is None:
        return None
    samples = as_samples(found, workload.collate, source)
    if not len(samples):
        if samples is found and split != "train":  # a corpus may be too small to hold a sample out
            return None
        raise _data_error(f"{source} is empty; return None if there is no such split")
    return samples


def traits_of(workload: Workload, samples: Samples) -> Traits:
    """Return what decides how its steps run (paceline.execution)."""
    return Traits(
        equal_layers=workload.compile_layers,
        few_shapes=hasattr(samples, "fixed_shape_batches") or _has_one_shape(samples),
        half_only=getattr(samples, "half_only", False),
        chunks_loss=workload.chunks_loss,
        own_loop=isinstance(workload, OwnLoop),
        own_optimizer=workload.has("optimizer"),
    )


def _has_one_shape(samples: Samples) -> bool:
    if hasattr(samples, "resident"):
        return True
    shapes = {
        tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(samples.batch(ids, ids * 0)))
        for ids in choose_few(samples, SHAPE_SAMPLES)[:, None]
    }
    return len(shapes) == 1


def choose_few(samples: Samples, count: int) -> np.ndarray:
    """Return the ids of a few samples: spread over all, or the first of a stream."""
    count = min(len(samples), count)
    last = count if getattr(samples, "in_order", False) else len(samples)
    return np.linspace(0, last - 1, count).astype(np.int64)


def as_samples(found: Any, collate: Callable[[list[Any]], Any] | None, source: str) -> Samples:
    """Convert the user's data to Samples; `source` begins the message if that is not possible."""
    if all(hasattr(found, name) for name in ("__len__", "cost", "batch")):
        return found
    if type(found) is TensorDataset and collate is None:
        found = found.tensors
    if hasattr(found, "to_numpy") and hasattr(found, "columns"):  # a DataFrame
        found = {str(name): found[name] for name in found.columns}
    if isinstance(found, Tensor | np.ndarray | tuple) or type(found) is dict or hasattr(found, "to_numpy"):
        return ArraySamples(found, source)
    if isinstance(found, DataLoader):
        raise _data_error(f"{source} returned a DataLoader; return its dataset")
    if isinstance(found, IterableDataset) or (hasattr(found, "__iter__") and not hasattr(found, "__getitem__")):
        if not isinstance(found, Sized):
            raise _data_error(f"{source} returned a stream, {type(found).__name__}, without a length; {ALLOWED}")
        return StreamSamples(NumberedStream(found), collate or getattr(found, "collate", None), source)
    missing = any(not hasattr(found, name) for name in ("__len__", "__getitem__"))
    if missing or isinstance(found, str | bytes | Mapping):
        raise _data_error(f"{source} returned {type(found).__name__}; {ALLOWED}")
    own = collate or getattr(found, "collate", None)
    if own is None and type(found).__module__.partition(".")[0] == "datasets" and found.format["type"] is None:
        found = found.with_format("torch")
    return DatasetSamples(found, own, source)


class ArraySamples:
    def __init__(self, columns: Any, source: str) -> None:
        columns = tree_map(lambda c: c.to_numpy() if hasattr(c, "to_numpy") else c, columns, is_leaf=_is_list)
        for path, leaf in tree_flatten_with_path(columns, is_leaf=_is_list)[0]:
            part = f"{source}{keystr(path)}"
            if isinstance(leaf, list):
                raise _data_error(f"{part} is a list; convert it with  np.array, or return a list of samples")
            if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
                raise _data_error(f"{part} is {_describe_leaf(leaf)}; {ALLOWED}")
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc":
                raise _data_error(f"{part} is {_describe_leaf(leaf)}; encode words and dates as numbers")
        self.columns = tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else _to_tensor(leaf), columns)
        leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(self.columns)[0]]
        if not leaves:
            raise _data_error(f"{source} is empty; {ALLOWED}")
        self.length = len(leaves[0][1])
        for name, leaf in leaves:
            if len(leaf) != self.length:
                first = f"{source.partition(': ')[2]}{leaves[0][0]} {self.length}"
                raise _data_error(f"{source}{name} has {len(leaf)} rows and {first}; row i of each must be sample i")

    def __len__(self) -> int:
        return self.length

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids))

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        rows = torch.from_numpy(ids)
        return tree_map(lambda column: column[rows], self.columns)

    def resident(self) -> Any:
        """Return all samples as tensors, so that a small data set can be kept on its device."""
        return self.columns


class DatasetSamples:
    """A data set with a length and items. What an item draws at random follows from its key alone.

    It draws from the generators of the process, so samples are made in worker processes or between two steps.
    """

    beside_the_loop = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, source: str) -> None:
        self.dataset, self.collate, self.source = dataset, collate, source
        self.own_cost = getattr(dataset, "cost", None)
        self.seeders = find_seeders(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids)) if self.own_cost is None else self.own_cost(ids)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        with preserve_generators():
            samples = [self._make_sample(i, key) for i, key in zip(ids.tolist(), keys.tolist(), strict=True)]
            if self.collate is not None:
                return self.collate(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            first, second, *_ = [*map(_describe_sample, samples), ""]
            differ = f"sample {ids[0]} is {first}{f' and sample {ids[1]} {second}' if second else ''}"
            hint = "align them in the data set, or give your Workload a method  collate(self, samples)"
            raise _data_error(f"{self.source}: {differ}, which cannot be stacked; {hint}") from error

    def _make_sample(self, number: int, key: int) -> Any:
        seed_generators(key)
        for seed in self.seeders:
            seed(key)
        try:
            return self.dataset[number]
        except Exception as error:
            error.add_note(f"(sample {number} of {self.source.partition(': ')[2]})")
            raise


class NumberedStream:
    """The items of a stream by their number: read forward, and from the start again to go back.

    What a stream draws at random follows from the number alone.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.items = stream, iter(())
        self.read = len(stream)
        self.recent: dict[int, Any] = {}
        self.seeders = [seed_generators, *find_seeders(stream)]

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, number: int) -> Any:
        if number < self.read and number not in self.recent:
            self.items, self.read = iter(self.stream), 0
        while self.read <= number:
            for seed in self.seeders:
                seed(self.read)
            try:
                self.recent[self.read] = next(self.items)
            except StopIteration:
                raise _data_error(f"the stream has {self.read} samples, and its length is {len(self)}") from None
            self.recent.pop(self.read - RECENT, None)
            self.read += 1
        return self.recent[number]


class StreamSamples(DatasetSamples):
    """A stream of known length, trained on in its own order: each rank reads all of it and keeps its share."""

    in_order = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seeders = []  # the stream seeds its own


def _data_error(message: str) -> UserError:
    return UserError(message, code="invalid-workload")


def _is_list(thing: Any) -> bool:
    return isinstance(thing, list)


def _to_tensor(array: np.ndarray) -> Tensor:
    """Share the memory of an array, if torch can read it."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def _describe_sample(sample: Any) -> str:
    leaves = tree_flatten_with_path(sample)[0]
    return ", ".join(f"{keystr(path)} {_describe_leaf(leaf)}".lstrip() for path, leaf in leaves)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(leaf, Tensor) else f"an array of {leaf.dtype}"
        return f"{kind} of shape {list(leaf.shape)}"
    return f"of type {type(leaf).__name__}"


def seed_generators(key: int) -> None:
    """Seed the generators of the process, in a few microseconds; `torch.manual_seed` alone takes a hundred."""
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002 - it is what users' data sets draw from
    torch.default_generator.manual_seed(key)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the generators of the process afterwards, as if nothing had drawn from them."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.default_generator.set_state(before[2])


def find_seeders(dataset: Any) -> list[Seed]:
    """Return the seed functions of the generators that a data set keeps, without running its code.

    They are searched in its attributes, what these hold, and the variables of their classes and modules.
    """
    found: dict[int, Seed] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
    waiting = deque([dataset])
    while waiting and len(seen) < MAX_VISITED:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, HOLDS_NONE):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, GENERATORS):
            if thing is not torch.default_generator:
                found[id(thing)] = _make_seeder(thing)
        else:
            waiting.extend(_iter_members(thing))
    return list(found.values())


def _iter_members(thing: Any) -> Iterator[Any]:
    match thing:
        case Mapping() | list() | tuple() | set() | frozenset() if len(thing) > MAX_MEMBERS:
            return
        case dict():
            yield from thing.values()
        case list() | tuple() | set() | frozenset():
            yield from thing
        case partial():
            yield from (thing.func, thing.args, thing.keywords)
        case MethodType():
            yield from (thing.__self__, thing.__func__)
        case FunctionType():
            yield from (cell.cell_contents for cell in thing.__closure__ or () if cell != EMPTY)
            yield from _find_generators(thing.__globals__)
        case _:
            yield from list(getattr(thing, "__dict__", {}).values())
            for kind in type(thing).__mro__:
                yield from _find_generators(vars(kind))
                yield from _find_generators(vars(sys.modules.get(kind.__module__, sys)))


def _find_generators(names: Mapping[str, Any]) -> list[Any]:
    return [value for value in names.values() if isinstance(value, GENERATORS)]


def _make_seeder(generator: Any) -> Seed:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda key: setattr(bits, "state", type(bits)(key).state)
    return generator.manual_seed if isinstance(generator, torch.Generator) else generator.seed
