"""Rounds of LightGBM, on one rank: on several, each rank would find its own bins, and the trees would differ."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np

from paceline.workloads.trees.boosting import BoostingJob
from paceline.workloads.trees.sections import Task, TreesModel

REPLACED = str.maketrans(dict.fromkeys(' ",:[]{}', "_"))
"""Characters that LightGBM rejects in column names."""


def build_lightgbm_parameters(model: TreesModel) -> dict[str, Any]:
    """Return the run file's parameters under LightGBM's names; what is not given is left to its defaults."""
    given = {
        "learning_rate": model.learning_rate,
        "max_depth": model.max_depth,
        "num_leaves": model.max_leaves,
        "min_sum_hessian_in_leaf": model.min_child_weight,
        "min_data_in_leaf": model.min_child_samples,
        "min_gain_to_split": model.gamma,
        "lambda_l2": model.reg_lambda,
        "lambda_l1": model.reg_alpha,
        "feature_fraction": model.colsample_bytree,
        "bagging_fraction": model.subsample,
        "bagging_freq": 1 if model.subsample < 1 else 0,
        "max_bin": model.max_bin,
        "scale_pos_weight": model.scale_pos_weight if model.scale_pos_weight != 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


class LightGBMRounds:
    def __init__(self, job: BoostingJob) -> None:
        self.job = job
        target = job.target
        self.parameters = {
            **build_lightgbm_parameters(job.model),
            "objective": target.objective.lightgbm,
            "metric": target.objective.lightgbm_loss,
            "num_threads": job.threads,
            "seed": job.seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbose": -1,
            **({"num_class": target.outputs} if target.objective.task is Task.CLASSES else {}),
            **({"eval_at": [1 << 30]} if target.objective.task is Task.RANKING else {}),
        }
        self.loaded = 0
        self.booster: Any = None

    def join(self) -> None:
        """Build the booster; rounds of a checkpoint are repeated, since LightGBM cannot restore its random state."""
        facts, split = self.job.table.facts, self.job.table.split("train")
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
        for number in range(self.loaded):
            self.train_round(number)

    def leave(self) -> None:
        """Do nothing: there is one rank."""

    def load(self, raw: bytes, done: int) -> None:
        self.loaded = done

    def train_round(self, number: int) -> None:
        self.booster.update()

    def loss(self) -> float:
        found = float(self.booster.eval_train()[0][2])
        return 1 - found if self.job.target.objective.task is Task.RANKING else found

    def any(self, flag: bool) -> bool:
        return flag

    def set_held_out(self, X: np.ndarray) -> None:
        self.held_out = X

    def margins(self) -> np.ndarray:
        found = np.asarray(self.booster.predict(self.held_out, raw_score=True, num_threads=self.job.threads))
        return found.reshape(len(self.held_out), self.job.target.outputs)

    def serialize(self) -> bytes:
        return str(self.booster.model_to_string()).encode()
