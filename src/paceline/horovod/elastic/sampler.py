"""Divide the rest of an epoch over the current ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod import world


class ElasticSampler(Sampler[int]):
    """Skip samples that were processed before a restart, on any number of ranks.

    Each rank records its own; counts are summed and the rest is divided anew when the state is synchronised.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.before = 0  # processed by all ranks at the last reset
        self.since = 0  # processed by this rank since then
        self.reset()

    @property
    def processed_num(self) -> int:
        return self.before + self.since

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. Call it at the end of the one before, so that a failure does not lose its rest."""
        self.epoch, self.before = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        self.since += len(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        self.since += len(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        return self.mine[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "before": self.before, "since": self.since}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.before = state["epoch"], state["before"]
        self.reset()
        self.since = state["since"]

    def reset(self) -> None:
        """Divide the rest over the current ranks; the first few repeat if it does not divide evenly."""
        ranks = world.size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(indices)
        rest = indices[self.before :]
        each = -(-len(rest) // ranks)
        while rest and len(rest) < each * ranks:
            rest += rest[: each * ranks - len(rest)]
        self.mine = rest[world.rank() :: ranks]
        self.since = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)
