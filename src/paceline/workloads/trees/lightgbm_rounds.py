"""Rounds of LightGBM, on one rank: on several, each would find bins of its own, and the trees would be others."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np

from paceline.workloads.trees.boosting import BoostingJob
from paceline.workloads.trees.sections import Task, TreesModel


def build_lightgbm_parameters(model: TreesModel) -> dict[str, Any]:
    """As LightGBM calls them; what is not given is left to it."""
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


def rounds(boosting: BoostingJob) -> LightGBMRounds:
    return LightGBMRounds(boosting)


class LightGBMRounds:
    def __init__(self, boosting: BoostingJob) -> None:
        self.boosting = boosting
        target = boosting.target
        self.parameters = {
            **build_lightgbm_parameters(boosting.model),
            "objective": target.objective.lightgbm,
            "metric": target.objective.lightgbm_loss,
            "num_threads": boosting.threads,
            "seed": boosting.seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbose": -1,
            **({"num_class": target.outputs} if target.objective.task is Task.CLASSES else {}),
            **({"eval_at": [1 << 30]} if target.objective.task is Task.RANKING else {}),
        }
        self.loaded = 0
        self.booster: Any = None

    def join(self) -> None:
        """LightGBM has no state to go on from, of rows and columns drawn by chance: rounds are made again."""
        facts, split = self.boosting.table.facts, self.boosting.table.split("train")
        names = [name.translate(SIGNS) for name in facts.columns]
        rows = lightgbm.Dataset(
            np.asarray(split.X),
            label=self.boosting.target.labels(split.y),
            weight=split.weights,
            group=None if split.queries is None else np.diff(np.append(split.queries, len(split))),
            feature_name=names,
            categorical_feature=[number for number, name in enumerate(facts.columns) if name in facts.categories],
            params=self.parameters,
        )
        self.booster = lightgbm.Booster(self.parameters, rows)
        for number in range(self.loaded):
            self.make(number)

    def leave(self) -> None:
        """There are no others."""

    def load(self, raw: bytes, done: int) -> None:
        self.loaded = done

    def make(self, number: int) -> None:
        self.booster.update()

    def loss(self) -> float:
        found = float(self.booster.eval_train()[0][2])
        return 1 - found if self.boosting.target.objective.task is Task.RANKING else found

    def any(self, flag: bool) -> bool:
        return flag

    def hold(self, X: np.ndarray) -> None:
        self.held = X

    def margins(self) -> np.ndarray:
        found = np.asarray(self.booster.predict(self.held, raw_score=True, num_threads=self.boosting.threads))
        return found.reshape(len(self.held), self.boosting.target.outputs)

    def raw(self) -> bytes:
        return str(self.booster.model_to_string()).encode()


SIGNS = str.maketrans(dict.fromkeys(' ",:[]{}', "_"))
"""Which LightGBM does not take in names of columns."""
