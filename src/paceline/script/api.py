"""What a script is given by `with paceline.run(…) as run`."""

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
    """Of this rank; batches and model come there by themselves."""
    rank: int
    ranks: int

    @property
    def main(self) -> bool:
        """Whether this is the rank that prints and writes what is written once."""
        return self.rank == 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Made so far, over the whole run; each of a global batch."""

    @abstractmethod
    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        """The model as the run file spreads it over ranks, and the optimiser of the same parameters.

        The optimiser keeps its class and groups; without one it is that of the run file. Learning rates follow
        `train.schedule`, or `schedule(samples seen, samples of the run)` as a factor.
        """

    @abstractmethod
    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        """This rank's part of each global batch, pass by pass, from where the run stands to its end; inside of
        `epochs()`, to the end of the epoch.

        `dataset` is what `Workload.data` may return. `workers` are processes that make samples, unless the run file
        says how many (`data.workers`).
        """

    @abstractmethod
    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Once for each batch: the sum of its losses, and how many there are. Computes gradients and, after the last
        pass of a global batch, makes the step."""

    @abstractmethod
    def epochs(self) -> Iterator[int]:
        """The epochs that are left, counted from 0; the first may be half done."""

    @abstractmethod
    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        """Metrics over a whole data set, the same on any number of ranks, and in the record.

        `sums` is called with batches as the loop gets them, and returns sums over their samples with a "count", by
        which they are divided. `best` is the metric that ranks checkpoints, `-loss` for one that is to be low.
        """

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """For an evaluation of the script's own: no gradients, the run's precision, averaged weights where it has
        them."""

    @abstractmethod
    def total(self, **sums: float | Tensor) -> dict[str, float]:
        """Each number, summed over the ranks."""

    @abstractmethod
    def share(self, dataset: Any) -> Any:
        """This rank's part of a data set: every sample is in one rank's part."""

    @abstractmethod
    def keep(self, **things: Stateful) -> None:
        """Have checkpoints hold these too, objects with `state_dict` and `load_state_dict`; before `batches`."""
