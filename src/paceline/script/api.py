"""The interface of a run that a script gets from `with paceline.run(…) as run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import RunSpec
from paceline.trainer.checkpoint.reader import Stateful

Schedule = Callable[[int, int], float]
"""(samples seen, samples of the whole run) -> factor of the learning rate."""
Sums = Callable[..., Mapping[str, Tensor | float]]
Model = TypeVar("Model", bound=nn.Module)


class ScriptRun(ABC):
    """One rank's view of its run."""

    spec: RunSpec
    device: torch.device
    """Of this rank; batches and the model are moved to it."""
    rank: int
    ranks: int

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the whole run so far, each of one global batch."""

    @abstractmethod
    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        """Return the model, distributed as the run file says, and the optimiser of its parameters.

        The optimiser keeps its class and groups; without one, the run file's is used. Learning rates follow
        `train.schedule`, or `schedule(samples seen, samples of the run)` as a factor.
        """

    @abstractmethod
    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        """Yield this rank's part of each global batch, pass by pass, to the end of the run or of the epoch.

        `dataset` is what `Workload.data` may return. `workers` processes load samples, unless the run file sets
        `data.workers`.
        """

    @abstractmethod
    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Take the sum of a batch's losses and their number; the last pass of a global batch updates the model."""

    @abstractmethod
    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs, counted from 0; the first may be partly done."""

    @abstractmethod
    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        """Return and record metrics over a whole data set, the same on any number of ranks.

        `sums` is called with batches as the loop gets them, and returns sums over their samples with a "count", by
        which they are divided. `best` is the metric that ranks checkpoints, with a minus if lower is better: `-loss`.
        """

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Context for your own evaluation: no gradients, the run's precision, averaged weights if it keeps them."""

    @abstractmethod
    def total(self, **sums: float | Tensor) -> dict[str, float]:
        """Return each number, summed over the ranks."""

    @abstractmethod
    def share(self, dataset: Any) -> Any:
        """Return this rank's part of a data set; every sample is in one part."""

    @abstractmethod
    def keep(self, **things: Stateful) -> None:
        """Save these objects, with `state_dict` and `load_state_dict`, in checkpoints; call it before `batches`."""
