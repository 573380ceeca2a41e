"""What is left of an epoch, dealt out over the ranks there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.horovod import world


class ElasticSampler(Sampler[int]):
    """Samples that were recorded as processed do not come again after a restart, on any number of ranks.

    Each rank records its own; what all ranks have processed is known when the state is synchronised, and what is left
    is dealt out anew then.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.before = 0  # processed by all ranks when the rest was dealt out
        self.since = 0  # processed by this rank since then
        self.reset()

    @property
    def processed_num(self) -> int:
        return self.before + self.since

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the one before, or the rest of that one is lost after a failure."""
        self.epoch, self.before = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        self.since += len(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        self.since += len(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Of one batch of this rank."""
        return self.mine[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        """As this rank knows it."""
        return {"epoch": self.epoch, "before": self.before, "since": self.since}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.before = state["epoch"], state["before"]
        self.reset()
        self.since = state["since"]

    def reset(self) -> None:
        """Deal out what is left over the ranks that are here now; the last few come twice where they do not divide."""
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
