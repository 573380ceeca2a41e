"""Which sample comes when, and who works on it.

The sample at global position p of epoch e is a pure function of (seed, e, p). A global batch is a range of
positions; ranks and accumulation only divide its samples among themselves, so that no number of ranks, no restart
and no accumulation can change which samples form a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from paceline.layout import Layout
from paceline.spec import Train
from paceline.workload import Samples

ROUNDS = 6
AT_ONCE = 64
SMALL_BYTES = 1 << 18
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each element (the splitmix64 finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream(*words: int) -> np.uint64:
    """One 64-bit key from several numbers."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = mix(key + _GOLDEN + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return key[0]


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at these positions of a shuffled epoch of n: a keyed bijection on 0 … n - 1, with no list kept.

    A Feistel network permutes the next even power of two; what falls outside is sent through again until it is
    inside, which keeps it a bijection.
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = mix(stream(seed, epoch) + np.arange(1, ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    x = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(len(x), bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        x[outside] = (left << half) | right
        outside = x >= n
    return x.astype(np.int64)


def sample_keys(ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """One 31-bit random number per sample and epoch, for dropout that does not depend on the layout."""
    return (mix(ids.astype(np.uint64) + stream(seed, epoch, 1)) >> np.uint64(33)).astype(np.int64)


@dataclass(frozen=True)
class Turn:
    """One global batch: its step, its epoch and its samples in their order."""

    step: int
    epoch: int
    ids: np.ndarray
    keys: np.ndarray
    seen: int
    """Samples before this step, over the whole run."""


@dataclass(frozen=True)
class Order:
    """The order of a whole run. The last batch of an epoch is what is left: nothing dropped, nothing repeated."""

    samples: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    def seen(self, step: int) -> int:
        """Samples trained on before a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch * self.samples + min(index * self.batch, self.samples)

    def turns(self, first: int, last: int) -> Iterator[Turn]:
        """The turns of steps first … last - 1, worked out for many at a time."""
        while first < last:
            epoch, index = divmod(first, self.steps_per_epoch)
            count = min(last - first, self.steps_per_epoch - index, AT_ONCE)
            begin = index * self.batch
            positions = np.arange(begin, min(begin + count * self.batch, self.samples))
            ids = permute(positions, self.samples, self.seed, epoch)
            keys = sample_keys(ids, self.seed, epoch)
            for i in range(count):
                mine = slice(i * self.batch, (i + 1) * self.batch)
                yield Turn(first + i, epoch, ids[mine], keys[mine], self.seen(first + i))
            first += count

    def turn(self, step: int) -> Turn:
        return next(self.turns(step, step + 1))


def total_steps(train: Train, order: Order) -> int:
    return train.steps or (train.epochs or 1) * order.steps_per_epoch


def deal(cost: np.ndarray, hands: int) -> list[np.ndarray]:
    """Divide samples into hands of equal size (within one) and nearly equal cost, each from cheap to dear.

    The samples are dealt from dear to cheap, back and forth, so that no hand is favoured.
    """
    order = np.argsort(-cost, kind="stable")
    rows = -(-len(order) // hands)
    table = np.full((rows, hands), -1, dtype=np.int64)
    table.flat[: len(order)] = order
    table[1::2] = table[1::2, ::-1]
    return [hand[hand >= 0][::-1] for hand in table.T]


@dataclass(frozen=True)
class Pass:
    """What one rank computes in one go. A rank that has nothing left gets a stand-in of weight 0."""

    batch: Any
    weight: int


@dataclass(frozen=True)
class Serving:
    """A rank's share of a turn, ready to compute."""

    turn: Turn
    passes: list[Pass]
    cost: int
    """Of the whole turn, over all ranks: its tokens, for texts."""
    data_s: float = 0.0
    """How long the loop waited for it."""
    rank: int = 0
    """Among the data-parallel ones."""


Cut = tuple[np.ndarray, np.ndarray]
"""The samples of one pass and their keys."""
Make = Callable[[list[Cut]], list[Any]]
"""Turns cuts into batches, several at a time where that is quicker."""


def share(turns: Sequence[Turn], samples: Samples, layout: Layout, rank: int, make: Make) -> list[Serving]:
    """What a data-parallel rank does in each turn: as many passes as every other, of nearly the same cost."""
    cuts: list[Cut] = []
    weights: list[list[int]] = []
    costs: list[int] = []
    for turn in turns:
        count, cost = layout.passes(len(turn.ids)), samples.cost(turn.ids)
        hands = deal(cost, layout.data * count)[rank * count : (rank + 1) * count]
        weights.append([1 if len(hand) else 0 for hand in hands])
        cuts += [(turn.ids[hand], turn.keys[hand]) if len(hand) else (turn.ids[:1], turn.keys[:1]) for hand in hands]
        costs.append(int(cost.sum()))
    batches = iter(make(cuts))
    return [
        Serving(turn, [Pass(next(batches), weight) for weight in mine], cost, rank=rank)
        for turn, mine, cost in zip(turns, weights, costs, strict=True)
    ]


def as_it_is(batch: Any) -> Any:
    return batch


def one_by_one(samples: Samples, finish: Callable[[Any], Any] = as_it_is) -> Make:
    return lambda cuts: [finish(samples.batch(*cut)) for cut in cuts]


def all_alike(samples: Any, rows: int, finish: Callable[[Any], Any] = as_it_is) -> Make:
    """Batches of the same shape, as a pipeline or a compiled layer needs them."""
    return lambda cuts: [finish(samples.padded(*cut, rows)) for cut in cuts]


def serve(
    samples: Samples,
    order: Order,
    layout: Layout,
    rank: int,
    first: int,
    last: int,
    make: Make | None = None,
    at_once: int = 1,
) -> Iterator[Serving]:
    """The servings of steps first … last - 1, made ahead by a thread while the loop computes."""
    ready: queue.Queue[Serving | BaseException] = queue.Queue(max(4, 2 * at_once))
    stop = threading.Event()
    make = make or one_by_one(samples)

    def offer(item: Serving | BaseException) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue

    def cook() -> None:
        try:
            turns = order.turns(first, last)
            while some := list(islice(turns, at_once)):
                for serving in share(some, samples, layout, rank, make):
                    offer(serving)
                if stop.is_set():
                    return
        except BaseException as error:  # handed to the loop, which raises it
            offer(error)

    thread = threading.Thread(target=cook, name="paceline-data", daemon=True)
    thread.start()
    try:
        for _ in range(first, last):
            began = time.perf_counter()
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield replace(item, data_s=time.perf_counter() - began)
    finally:
        stop.set()
        thread.join()


def pinned(batch: Any) -> Any:
    """In memory from which a device can copy by itself; a small tensor is copied sooner than it is pinned."""
    return _each(batch, lambda tensor: tensor.pin_memory() if tensor.nbytes > SMALL_BYTES else tensor)


def move(batch: Any, device: Any) -> Any:
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _each(batch: Any, do: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, do, batch)
