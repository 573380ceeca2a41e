"""What a library of trees does for a run: a round at a time, on this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from paceline.launch.environment import RankInfo
from paceline.workloads.trees.sections import TreesData, TreesModel
from paceline.workloads.trees.table import PreparedTable
from paceline.workloads.trees.targets import TreeTarget


@dataclass(frozen=True)
class BoostingJob:
    """All that the rounds of one rank depend on."""

    model: TreesModel
    data: TreesData
    table: PreparedTable
    target: TreeTarget
    seed: int
    place: RankInfo
    threads: int
    timeout_s: float
    device: str = "cpu"

    @cached_property
    def rows(self) -> slice:
        """Those of this rank: the next so many for each, in their order; of a ranking, the next so many queries."""
        rows, place = self.table.facts.rows, self.place
        starts = self.table.split("train").queries
        count = rows if starts is None else len(starts)
        edges = [count * number // place.world for number in (place.rank, place.rank + 1)]
        return slice(*edges) if starts is None else slice(*np.append(starts, rows)[edges].tolist())

    def some(self, rows: slice) -> dict[str, Any]:
        """Some rows to learn from, as the libraries call their parts; mapped for as long as they are held."""
        split = self.table.split("train")
        found = {"data": split.X[rows], "label": self.target.labels(split.y[rows])}
        if split.weights is not None:
            found["weight"] = split.weights[rows]
        if split.queries is not None:
            found["qid"] = np.searchsorted(split.queries, np.arange(rows.start, rows.stop), side="right")
        return found


class Rounds(Protocol):
    """The trees so far, and the next ones."""

    def join(self) -> None:
        """Bin the rows and meet the other ranks; before the first round, and not where none is left to make."""
        ...

    def leave(self) -> None: ...

    def load(self, raw: bytes, done: int) -> None:
        """Begin with the trees of the first `done` rounds, as `raw` gave them."""
        ...

    def make(self, number: int) -> None:
        """One round: a tree or, of several classes, a tree for each."""
        ...

    def loss(self) -> float:
        """The mean over all rows of all ranks that are learned from; of a ranking, what NDCG lacks of 1."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether a rank says so."""
        ...

    def hold(self, X: np.ndarray) -> None:
        """Rows to be asked about now and then; a rank may have none."""
        ...

    def margins(self) -> np.ndarray:
        """What the trees say of those rows, before it is made a probability: (rows, outputs)."""
        ...

    def raw(self) -> bytes: ...


def load_library(name: str) -> Callable[[BoostingJob], Any]:
    """UserError where it is not installed."""
    from importlib import import_module, util

    from paceline.errors import UserError

    if util.find_spec(name) is None:
        raise UserError(f"model.library={name}: it is not installed; type  pip install 'paceline[trees]'")
    module = import_module(f"paceline.workloads.trees.{name}_rounds")
    found: Callable[[BoostingJob], Any] = module.rounds
    return found
