"""What a tree library does for a run, a round at a time, on this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, util
from typing import Any, Protocol

import numpy as np

from paceline.errors import UserError
from paceline.launch.environment import RankInfo
from paceline.workloads.trees.sections import TreesData, TreesModel
from paceline.workloads.trees.table import PreparedTable
from paceline.workloads.trees.targets import TreeTarget


@dataclass(frozen=True)
class BoostingJob:
    """Everything that the rounds of one rank depend on."""

    model: TreesModel
    data: TreesData
    table: PreparedTable
    target: TreeTarget
    seed: int
    rank_info: RankInfo
    threads: int
    timeout_s: float
    device: str = "cpu"

    @cached_property
    def rows(self) -> slice:
        """This rank's rows, an equal share in their order; of a ranking, an equal share of the queries."""
        rows, rank_info = self.table.facts.rows, self.rank_info
        starts = self.table.split("train").queries
        count = rows if starts is None else len(starts)
        edges = [count * number // rank_info.world for number in (rank_info.rank, rank_info.rank + 1)]
        return slice(*edges) if starts is None else slice(*np.append(starts, rows)[edges].tolist())

    def training_rows(self, rows: slice) -> dict[str, Any]:
        """Return some training rows under the libraries' names for their parts; they stay mapped."""
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
        """Bin the rows and connect the ranks, before the first round; not called where no round is left."""
        ...

    def leave(self) -> None: ...

    def load(self, raw: bytes, done: int) -> None:
        """Begin with the trees of the first `done` rounds, as `serialize` returned them."""
        ...

    def train_round(self, number: int) -> None:
        """Add a tree or, for several classes, a tree for each."""
        ...

    def loss(self) -> float:
        """Return the mean over the training rows of all ranks; of a ranking, 1 - NDCG."""
        ...

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        ...

    def set_held_out(self, X: np.ndarray) -> None:
        """Set the rows that `margins` predicts; a rank may have none."""
        ...

    def margins(self) -> np.ndarray:
        """Return the raw scores of the held-out rows: (rows, outputs)."""
        ...

    def serialize(self) -> bytes: ...


def load_library(name: str) -> Callable[[BoostingJob], Any]:
    """Return the class whose instances are the rounds of a library."""
    if util.find_spec(name) is None:
        raise UserError(
            f"model.library={name} is not installed; type  pip install 'paceline[trees]'",
            code="not-installed",
            key="model.library",
        )
    module = import_module(f"paceline.workloads.trees.{name}_rounds")
    rounds: Callable[[BoostingJob], Any] = getattr(
        module, {"xgboost": "XGBoostRounds", "lightgbm": "LightGBMRounds"}[name]
    )
    return rounds
