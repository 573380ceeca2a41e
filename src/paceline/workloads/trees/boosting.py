"""What the rounds of one rank depend on, the library that trains them, and rounds of LightGBM."""

from collections.abc import Callable
from functools import cached_property
from importlib import util
from typing import Any, cast

import numpy as np
import torch

from paceline.config import RunSpec
from paceline.data.prepared_table import PreparedTable, TableTarget, Task
from paceline.errors import not_installed
from paceline.launch.environment import RankInfo
from paceline.workloads.trees.sections import LIBRARIES, OBJECTIVES, TreesData, TreesModel

REPLACED = str.maketrans(dict.fromkeys(' ",:[]{}', "_"))  # LightGBM rejects them in column names


class BoostingJob:
    def __init__(
        self, spec: RunSpec, table: PreparedTable, target: TableTarget, rank_info: RankInfo, device: str
    ) -> None:
        self.model, self.data = cast(TreesModel, spec.model), cast(TreesData, spec.data)
        self.table, self.target, self.rank_info, self.device = table, target, rank_info, device
        self.seed, self.timeout_s, self.threads = spec.train.seed, spec.parallel.timeout_s, torch.get_num_threads()

    @cached_property
    def rows(self) -> slice:
        """This rank's rows, an equal share in their order; of a ranking, an equal share of the queries."""
        rows, rank, starts = self.table.facts.rows, self.rank_info.rank, self.table.split("train").queries
        count = rows if starts is None else len(starts)
        edges = [count * number // self.rank_info.world for number in (rank, rank + 1)]
        return slice(*edges) if starts is None else slice(*np.append(starts, rows)[edges].tolist())

    def translate_parameters(self, library: str) -> dict[str, Any]:
        """Return the section `model` as parameters of a library; those that are None are its own defaults."""
        given = {name: getattr(self.model, key) for key, name in LIBRARIES[library].items()}
        found = {name: value for name, value in given.items() if value is not None}
        found["seed"] = self.seed
        if self.model.scale_pos_weight != 1:
            found["scale_pos_weight"] = self.model.scale_pos_weight
        if self.target.task is Task.CLASSES:
            found["num_class"] = self.target.outputs
        return found

    def training_rows(self, rows: slice) -> dict[str, Any]:
        """Return some training rows under the libraries' names for their parts; they stay mapped."""
        split = self.table.split("train")
        found = {"data": split.X[rows], "label": self.target.labels(split.y[rows])}
        if split.weights is not None:
            found["weight"] = split.weights[rows]
        if split.queries is not None:
            found["qid"] = np.searchsorted(split.queries, np.arange(rows.start, rows.stop), side="right")
        return found


def load_library(name: str) -> Callable[[BoostingJob], Any]:
    """Return the class whose instances are the rounds of a library."""
    if util.find_spec(name) is None:
        raise not_installed(f"model.library={name}", name, "paceline[trees]")
    if name == "lightgbm":
        return LightGBMRounds
    from paceline.workloads.trees.xgboost_rounds import XGBoostRounds

    return XGBoostRounds


class LightGBMRounds:
    """Rounds on one rank: on several, each would find its own bins, and the trees would differ."""

    def __init__(self, job: BoostingJob) -> None:
        self.job = job
        model, target = job.model, job.target
        self.parameters = {
            **job.translate_parameters("lightgbm"),
            "bagging_freq": int(model.subsample < 1),
            "objective": OBJECTIVES[target.task]["lightgbm"],
            "metric": OBJECTIVES[target.task]["lightgbm_loss"],
            "num_threads": job.threads,
            "deterministic": True,
            "force_row_wise": True,
            "verbose": -1,
            **({"eval_at": [1 << 30]} if target.task is Task.RANKING else {}),
        }
        self.repeated, self.held_out = 0, np.empty((0, 1), np.float32)
        self.booster: Any = None

    def join(self) -> None:
        """Build the booster; rounds are repeated, since LightGBM cannot restore its random state."""
        facts, split = self.job.table.facts, self.job.table.split("train")
        import lightgbm

        rows = lightgbm.Dataset(
            np.asarray(split.X),
            label=self.job.target.labels(split.y),
            weight=split.weights,
            group=None if split.queries is None else np.diff(np.append(split.queries, len(split))),
            feature_name=[name.translate(REPLACED) for name in facts.columns],
            categorical_feature=[number for number, name in enumerate(facts.columns) if name in facts.categories],
            params=self.parameters,
        )
        self.booster = lightgbm.Booster(self.parameters, rows)
        for number in range(self.repeated):
            self.train_round(number)

    def leave(self) -> None:
        """Do nothing: there is one rank."""

    def load(self, raw: bytes, done: int) -> None:
        """Set how many rounds `join` trains again: saved trees of LightGBM do not continue exactly."""
        self.repeated = done

    def train_round(self, number: int) -> None:
        self.booster.update()

    def loss(self) -> float:
        loss = float(self.booster.eval_train()[0][2])
        return 1 - loss if self.job.target.task is Task.RANKING else loss

    def any(self, flag: bool) -> bool:
        return flag

    def margins(self) -> np.ndarray:
        margins = np.asarray(self.booster.predict(self.held_out, raw_score=True, num_threads=self.job.threads))
        return margins.reshape(len(self.held_out), self.job.target.outputs)

    def serialize(self) -> bytes:
        return str(self.booster.model_to_string()).encode()
