"""A rank's share of each global batch, divided into micro-batches and prefetched by threads.

Without workers, samples that draw from the generators of the process are made between two steps instead.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat, takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.data.order import GlobalBatch, Order, split_by_cost
from paceline.data.samples import cost_of
from paceline.data.workers import WorkerDied
from paceline.errors import RunFailed
from paceline.layout import Layout
from paceline.nn.batch_norm import divide_into_groups
from paceline.workload import Samples

SMALL_BYTES = 1 << 18
AHEAD = 4  # batches, or half as many groups of them, that are made before the loop asks for them

Wanted = TypeVar("Wanted")
Made = TypeVar("Made")

IdsAndKeys = tuple[np.ndarray, np.ndarray]  # of one micro-batch
Collate = Callable[[list[IdsAndKeys]], list[Any]]  # makes several batches at a time, if that is faster


class KeyedBatch(NamedTuple):
    """A batch with the random number of each row, for models whose layers draw from it or go by groups of samples."""

    batch: Any
    keys: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes in one forward and backward pass; weight 0 if it has no samples left."""

    batch: Any
    weight: int


@dataclass(frozen=True)
class RankBatch:
    global_batch: GlobalBatch
    micro_batches: list[MicroBatch]
    cost: int  # of the whole global batch: its tokens, for texts
    rank: int  # among the data-parallel ones
    load_s: float = 0.0  # how long it took to make, in one thread or worker process
    data_s: float = 0.0  # how long the loop waited for it

    @property
    def samples(self) -> int:
        return len(self.global_batch.ids)


@dataclass(frozen=True)
class Loader:
    samples: Samples
    order: Order
    layout: Layout
    rank: int
    collate: Collate
    at_once: int = 1  # steps whose batches are made together
    group: int = 1  # consecutive samples that stay together on one rank
    pads_empty: bool = False  # whether a pass without samples can have rows that do not count, not others' samples

    def load(self, batches: Sequence[GlobalBatch]) -> list[RankBatch]:
        """Return this rank's share of each: as many micro-batches as other ranks have, of nearly the same cost."""
        wanted, weights, totals = list[IdsAndKeys](), list[list[int]](), list[int]()
        for whole in batches:
            count, cost = self.layout.passes(len(whole.ids)), cost_of(self.samples, whole.ids)
            shares = split_groups(cost, self.layout.data * count, self.group)
            shares = shares[self.rank * count : (self.rank + 1) * count]
            weights.append([1 if len(share) else 0 for share in shares])
            unused = np.arange(0 if self.pads_empty else min(self.group, len(whole.ids)))
            wanted += [(whole.ids[s], whole.keys[s]) for s in (share if len(share) else unused for share in shares)]
            totals.append(int(cost.sum()))
        began = time.perf_counter()
        try:
            made = iter(self.collate(wanted))
        except WorkerDied as died:
            raise RunFailed(f"{died} while it made the samples of step {batches[0].step + 1}") from None
        load_s = (time.perf_counter() - began) / len(batches)
        return [
            RankBatch(whole, [MicroBatch(next(made), weight) for weight in mine], cost, self.rank, load_s)
            for whole, mine, cost in zip(batches, weights, totals, strict=True)
        ]

    def prefetch(self, first: int, last: int) -> Generator[RankBatch]:
        """Yield the batches of steps first … last - 1, made while the loop computes, if possible."""
        batches = self.order.global_batches(first, last)
        groups = iter(lambda: list(islice(batches, self.at_once)), [])
        if not getattr(self.samples, "beside_the_loop", True):
            for batch in (batch for group in groups for batch in self.load(group)):
                yield replace(batch, data_s=batch.load_s)
            return
        loaded = map_in_order(self.load, groups, count_workers(self.samples))
        ahead = AHEAD if self.at_once == 1 else AHEAD // 2
        ready = map_in_order(lambda _: next(loaded, []), repeat(None), 1, ahead)
        began = time.perf_counter()
        for some in takewhile(bool, ready):
            yield replace(some[0], data_s=time.perf_counter() - began)
            yield from some[1:]
            began = time.perf_counter()


def split_groups(cost: np.ndarray, shares: int, group: int) -> list[np.ndarray]:
    """Divide samples by cost into shares of whole groups; the last group, which may be shorter, comes last in its."""
    if group == 1:
        return split_by_cost(cost, shares)
    sizes = divide_into_groups(len(cost), group)
    ends = np.cumsum(sizes, dtype=np.int64)
    dealt = split_by_cost(np.add.reduceat(cost, ends - sizes), shares)
    groups = np.split(np.arange(len(cost)), ends[:-1])
    return [np.concatenate([ends[:0], *(groups[i] for i in np.sort(mine))]) for mine in dealt]


def count_workers(samples: Samples) -> int:
    return getattr(samples, "workers", 0)


def iter_batches(samples: Samples, wanted: Iterable[IdsAndKeys]) -> Iterator[Any]:
    """Yield the batches of these samples, made ahead if there are workers."""
    return map_in_order(lambda request: samples.batch(*request), wanted, count_workers(samples))


def map_in_order(
    make: Callable[[Wanted], Made], wanted: Iterable[Wanted], threads: int, ahead: int = 0
) -> Iterator[Made]:
    """Yield `make(x)` of each in order: `ahead` of the caller (else two per thread), or lazily without threads."""
    if not threads:
        yield from map(make, wanted)
        return
    wanted = iter(wanted)
    with ThreadPoolExecutor(threads, "paceline-worker") as pool:
        begun: deque[Future[Made]] = deque(pool.submit(make, item) for item in islice(wanted, ahead or 2 * threads))
        try:
            while begun:
                made = begun.popleft().result()
                begun.extend(pool.submit(make, item) for item in islice(wanted, 1))
                yield made
        finally:
            pool.shutdown(cancel_futures=True)


def make_collate(make: Callable[..., Any], pin: bool = False) -> Collate:
    """Return a function that makes batches; `pin` large tensors: a small one is copied faster than it is pinned."""
    most = SMALL_BYTES if pin else math.inf
    pin_large = partial(tree_map_only, Tensor, lambda tensor: tensor.pin_memory() if tensor.nbytes > most else tensor)
    return lambda wanted: [pin_large(make(*request)) if pin else make(*request) for request in wanted]


def add_keys(collate: Collate, rows: int = 0) -> Collate:
    """Return a function that makes the same batches with the keys of their samples, filled up to `rows`."""

    def make(wanted: list[IdsAndKeys]) -> list[Any]:
        keys = [np.pad(own, (0, max(0, rows - len(own)))) for _, own in wanted]
        return [KeyedBatch(b, torch.from_numpy(k)) for b, k in zip(collate(wanted), keys, strict=True)]

    return make


def move_batch(batch: Any, device: Any, precision: str = "") -> Any:
    """Copy tensors to the device, and to fp64 what a model in fp64 multiplies with."""
    kind = torch.float64 if precision == "fp64" else None

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, kind if tensor.is_floating_point() else None, non_blocking=True)

    return tree_map_only(Tensor, move, batch)
