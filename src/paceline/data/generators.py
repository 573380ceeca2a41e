"""Random generators that a user's data set draws from: those of the process, and its own."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
HOLDS_NONE = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType)
MAX_MEMBERS = 64  # of a list or dict in which a generator is searched: transforms, not samples
MAX_VISITED = 10_000
EMPTY = CellType()

Seed = Callable[[int], object]


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

    They are searched in its attributes, in the data sets and transforms that these have, and in the variables of the
    classes and modules that define them.
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
    match generator:
        case np.random.Generator():
            return lambda key: setattr(generator.bit_generator, "state", type(generator.bit_generator)(key).state)
        case torch.Generator():
            return generator.manual_seed
    return generator.seed
