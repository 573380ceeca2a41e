"""Which sample comes when: a permutation of each epoch, cut into global batches.

The sample at position p of epoch e is a pure function of (seed, e, p). A global batch is a range of positions, which
ranks and accumulation only divide: neither they nor a restart change which samples form a step.
"""

from bisect import bisect
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paceline.config import Train

ROUNDS = 6
AT_ONCE = 64  # global batches whose samples are computed together
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """Hash each element to 64 bits (the splitmix64 finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_key(*words: int) -> np.uint64:
    key = np.zeros(1, np.uint64)
    for word in words:
        key = mix(key + _GOLDEN + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return key[0]


def draw_fractions(key: np.uint64, first: int, count: int) -> np.ndarray:
    """Return numbers from 0 to 1: those from `first` on of a stream that depends on the key alone."""
    steps = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
    return (mix(key + steps) >> np.uint64(11)) / 2.0**53


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples at these positions of a shuffled epoch of n: a keyed bijection on 0 … n - 1.

    A Feistel network permutes the next even power of two; what falls outside is permuted again until it is inside.
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = mix(derive_key(seed, epoch) + np.arange(1, ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    x = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.ones(len(x), bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        x[outside] = (left << half) | right
        outside = x >= n
    return x.astype(np.int64)


def derive_sample_keys(ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return a 31-bit random number per sample and epoch, for dropout that does not depend on the layout."""
    return (mix(ids.astype(np.uint64) + derive_key(seed, epoch, 1)) >> np.uint64(33)).astype(np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    step: int
    epoch: int
    ids: np.ndarray
    keys: np.ndarray
    seen: int
    """Samples before this step, over the whole run."""


class Stretch(NamedTuple):
    """Steps of one size in one epoch."""

    first: int  # step
    epoch: int
    begin: int  # position
    batch: int


@dataclass(frozen=True)
class Order:
    """The order of a whole run. The last batch of an epoch is what is left: nothing dropped, nothing repeated."""

    samples: int
    batch: int  # the last size, if it grows
    seed: int
    growth: tuple[tuple[int, int], ...] = ()  # (first step, samples) of other sizes before, and of the last
    shuffled: bool = True

    @classmethod
    def of(cls, train: Train, samples: Sized | int) -> "Order":
        """Return the order of this many samples, or of `samples` themselves: a stream keeps its own order."""
        growth = tuple(sorted(train.batch_schedule.items()))
        count = samples if isinstance(samples, int) else len(samples)
        batch = growth[-1][1] if growth else train.global_batch
        return cls(count, batch, train.seed, growth, shuffled=not getattr(samples, "in_order", False))

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The stretches of a growing batch; from the last one on, all epochs have the last size alone."""
        found, step, epoch, begin = list[Stretch](), 0, 0, 0
        sizes = self.growth or ((0, self.batch),)
        for (_, batch), end in zip(sizes, [*(first for first, _ in sizes[1:]), 0], strict=True):
            while step < end or (not end and begin):
                left = -(-(self.samples - begin) // batch)
                steps = min(left, end - step) if end else left
                found.append(Stretch(step, epoch, begin, batch))
                step, begin = step + steps, begin + steps * batch
                if begin >= self.samples:
                    epoch, begin = epoch + 1, 0
        return [*found, Stretch(step, epoch, 0, self.batch)]

    def locate(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, position, size) of the batch of a step."""
        at = self.stretches[bisect(self.stretches, step, key=lambda stretch: stretch.first) - 1]
        if at is not self.stretches[-1]:
            return at.epoch, at.begin + (step - at.first) * at.batch, at.batch
        epochs, index = divmod(step - at.first, self.steps_per_epoch)
        return at.epoch + epochs, index * at.batch, at.batch

    def first_step(self, epoch: int) -> int:
        """Return the step with which an epoch begins."""
        last = self.stretches[-1]
        if epoch >= last.epoch:
            return last.first + (epoch - last.epoch) * self.steps_per_epoch
        return next(s.first for s in self.stretches if s.epoch == epoch and s.begin == 0)

    def is_epoch_end(self, step: int) -> bool:
        """Return whether an epoch is over after so many steps."""
        return step > 0 and self.locate(step)[1] == 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    def seen(self, step: int) -> int:
        """Return the number of samples trained on before a step."""
        epoch, position, _ = self.locate(step)
        return epoch * self.samples + position

    def global_batches(self, first: int, last: int) -> Iterator[GlobalBatch]:
        while first < last:
            epoch, begin, batch = self.locate(first)
            grown = next((step for step, _ in self.growth if step > first), last)
            count = min(last - first, -(-(self.samples - begin) // batch), AT_ONCE, grown - first)
            positions = np.arange(begin, min(begin + count * batch, self.samples))
            ids = permute(positions, self.samples, self.seed, epoch) if self.shuffled else positions
            keys = derive_sample_keys(ids, self.seed, epoch)
            for i in range(count):
                mine = slice(i * batch, (i + 1) * batch)
                yield GlobalBatch(first + i, epoch, ids[mine], keys[mine], self.seen(first + i))
            first += count

    def global_batch(self, step: int) -> GlobalBatch:
        return next(self.global_batches(step, step + 1))


def total_steps(train: Train, order: Order) -> int:
    return train.steps or order.first_step(train.epochs or 1)


def split_by_cost(cost: np.ndarray, shares: int) -> list[np.ndarray]:
    """Divide samples into shares of equal size (within one) and nearly equal cost, each sorted by rising cost.

    They are dealt out from the most expensive on, back and forth.
    """
    if shares == 1 and len(cost) and (cost == cost[0]).all():
        return [np.arange(len(cost))[::-1]]  # the same result, much faster
    order = np.argsort(-cost, kind="stable")
    rows = -(-len(order) // shares)
    table = np.full((rows, shares), -1, dtype=np.int64)
    table.flat[: len(order)] = order
    table[1::2] = table[1::2, ::-1]
    return [share[share >= 0][::-1] for share in table.T]


MIN_CHUNKS = 4  # chunks (`Workload.evaluation_chunk`) that are always evaluated
EVALUATED_SHARE = 0.5
"""Samples evaluated per sample trained on since the last evaluation, at most: about a sixth of its time."""
SUBSET_SEED, SUBSET_EPOCH = 0, -1  # the same for every seed of the training, so that runs can be compared


def count_evaluated(train: Train, order: Order, held_out: int, chunk: int) -> int:
    """Return how many held-out samples an evaluation during a run uses; a chunk is computed in one pass."""
    if train.evaluate_on != "auto":
        return held_out if train.evaluate_on == "all" else min(held_out, train.evaluate_on)
    steps = total_steps(train, order)
    between = order.seen(min(steps, train.evaluate_every or order.steps_per_epoch))
    return min(held_out, max(MIN_CHUNKS * chunk, round(EVALUATED_SHARE * between)))


def select_evaluated(held_out: int, count: int) -> np.ndarray:
    """Return the ids of these samples: all, or a subset that depends on the two numbers alone."""
    if count >= held_out:
        return np.arange(held_out)
    return np.sort(permute(np.arange(count), held_out, SUBSET_SEED, SUBSET_EPOCH))


def describe_subset(train: Train, order: Order, held_out: int, chunk: int) -> str:
    count = count_evaluated(train, order, held_out, chunk)
    if count == held_out:
        return f"evaluated on all {held_out:,} held-out samples"
    hint = "" if train.evaluate_on != "auto" else "; all of them with train.evaluate_on=all"
    return f"evaluated on {count:,} of {held_out:,} held-out samples, the same ones each time{hint}"
