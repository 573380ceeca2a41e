"""The interface of a run that a script gets from `with paceline.run(…) as run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import RunSpec
from paceline.script.guards import check_pair, take_share
from paceline.trainer.checkpoint.reader import Stateful

Schedule = Callable[[int, int], float]
"""(samples seen, samples of the whole run) -> factor of the learning rate."""
Sums = Callable[..., Mapping[str, Tensor | float]]
Model = TypeVar("Model", bound=nn.Module)


class ScriptRun(ABC):
    """One rank's view of its run. The defaults are those of one process that trains nothing."""

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

    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        """Return the model, distributed as the run file says, and the optimiser of its parameters.

        The optimiser keeps its class and groups; without one, the run file's is used. Learning rates follow
        `train.schedule`, or `schedule(samples seen, samples of the run)` as a factor.
        """
        check_pair(False, model, optimizer, others)
        return model, optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)

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

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs, counted from 0; the first may be partly done."""
        yield 0

    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        """Return and record metrics over a whole data set, the same on any number of ranks.

        `sums` is called with batches as the loop gets them, and returns sums over their samples with a "count", by
        which they are divided. `best` is the metric that ranks checkpoints, with a minus if lower is better: `-loss`.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Context for your own evaluation: no gradients, the run's precision, averaged weights if it keeps them."""
        return nullcontext()

    def total(self, **sums: float | Tensor) -> dict[str, float]:
        """Return each number, summed over the ranks."""
        return {name: float(value) for name, value in sums.items()}

    def share(self, dataset: Any) -> Any:
        """Return this rank's part of a data set; every sample is in one part."""
        return take_share(dataset, 0, 1, equal=False)

    @abstractmethod
    def keep(self, **things: Stateful) -> None:
        """Save these objects, with `state_dict` and `load_state_dict`, in checkpoints; call it before `batches`."""
