"""Sections `model` and `data` of a run file of boosted trees, and the objectives both libraries support."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from paceline.config.sections import Section, TableData, conflict_error, field
from paceline.data.prepared_table import Task


class Objective(NamedTuple):
    """What the libraries call an objective and its loss."""

    xgboost: str
    xgboost_loss: str
    lightgbm: str
    lightgbm_loss: str


OBJECTIVES = {
    Task.BINARY: Objective("binary:logistic", "logloss", "binary", "binary_logloss"),
    Task.CLASSES: Objective("multi:softprob", "mlogloss", "multiclass", "multi_logloss"),
    Task.NUMBER: Objective("reg:squarederror", "rmse", "regression", "l2"),
    Task.COUNT: Objective("count:poisson", "poisson-nloglik", "poisson", "poisson"),
    Task.RANKING: Objective("rank:ndcg", "ndcg", "lambdarank", "ndcg"),
}
BY_NAME = {name: task for task, known in OBJECTIVES.items() for name in (known.xgboost, known.lightgbm)}
NAMES: Any = ("auto", *BY_NAME)


os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Waiting threads sleep instead of spinning: rounds are ten times faster where processes share cores. Torch reads it
when imported, which is after a run file is read; ranks inherit it."""
LIBRARY_NAMES = {
    "model.learning_rate": ("eta", "shrinkage_rate"),
    "model.reg_lambda": ("lambda", "lambda_l2"),
    "model.reg_alpha": ("alpha", "lambda_l1"),
    "model.max_leaves": ("num_leaves",),
    "model.subsample": ("bagging_fraction",),
    "model.colsample_bytree": ("feature_fraction",),
    "model.gamma": ("min_split_loss", "min_gain_to_split"),
    "model.min_child_weight": ("min_sum_hessian_in_leaf",),
    "model.min_child_samples": ("min_data_in_leaf",),
    "train.steps": ("n_estimators", "num_boost_round", "num_iterations"),
    "train.patience": ("early_stopping_rounds",),
    "train.seed": ("seed", "random_state"),
    "parallel.threads": ("nthread", "n_jobs", "num_threads"),
    "parallel.device": ("device",),
}
FIXED = ("max_cat_to_onehot", "tree_method", "booster", "colsample_bylevel", "colsample_bynode")
"""Parameters that would make the answer depend on the ranks or on a restart."""
ONE_LIBRARY = {"grow_policy": "xgboost", "max_delta_step": "xgboost", "min_child_samples": "lightgbm"}


class TreesModel(Section):
    """A sum of trees, each grown on the residual of those before it. None is the library's own default."""

    references = ("metric",)

    library: Literal["xgboost", "lightgbm"] = field("xgboost", "", "xgboost on any number of ranks, lightgbm on one")
    objective: Literal[NAMES] = field(  # type: ignore[valid-type]
        "auto", "", "what is predicted; auto looks at the label (two values, words, or numbers) and at data.query"
    )
    learning_rate: float | None = field(None, "", "scales each tree; xgboost 0.3, lightgbm 0.1", gt=0, le=1)
    max_depth: int | None = field(None, "levels", "of a tree; xgboost 6, lightgbm no limit", gt=0, le=16)
    max_leaves: int | None = field(None, "leaves", "of a tree; xgboost no limit, lightgbm 31", gt=1, le=65536)
    min_child_weight: float | None = field(
        None, "sum of hessians", "at least in a leaf; xgboost 1, lightgbm 0.001", ge=0
    )
    min_child_samples: int | None = field(None, "rows", "at least in a leaf; lightgbm alone, 20", ge=0)
    gamma: float = field(0.0, "of the loss", "a split gains at least this", ge=0)
    reg_lambda: float | None = field(None, "", "L2 penalty on what leaves say; xgboost 1, lightgbm 0", ge=0)
    reg_alpha: float = field(0.0, "", "L1 penalty on what leaves say", ge=0)
    max_delta_step: float = field(0.0, "", "most that a leaf says, before the learning rate; 0 has no limit", ge=0)
    subsample: float = field(1.0, "fraction", "of rows in a round, drawn by row number and round", gt=0, le=1)
    colsample_bytree: float = field(1.0, "fraction", "of columns in a round, drawn by round", gt=0, le=1)
    max_bin: int | None = field(None, "bins", "of a column; xgboost 256, lightgbm 255", gt=1, le=65535)
    metric: str | None = field(None, "", "function of (labels, predictions) for evaluations, as file.py:function")
    scale_pos_weight: float = field(1.0, "", "weight of the second of two classes", gt=0)
    grow_policy: Literal["depthwise", "lossguide"] = field(
        "depthwise", "", "xgboost alone: level by level, or where the loss falls most"
    )

    @model_validator(mode="before")
    @classmethod
    def _translate_library_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, Mapping) else ():
            if here := next((key for key, names in LIBRARY_NAMES.items() if name in names), ""):
                raise conflict_error(f"model.{name}: here it is called {here}; type  {here}={values[name]}")
            if name in FIXED:
                raise conflict_error(f"model.{name}: the trees would depend on the ranks; leave it out")
        return values

    @model_validator(mode="after")
    def _check_library(self) -> TreesModel:
        for name, library in ONE_LIBRARY.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.library != library:
                raise conflict_error(f"model.{name} is for {library}, not model.library={self.library}; leave it out")
        return self


class TreesData(TableData):
    """A table with a label column; without a path, a synthetic one."""

    query: str | None = field(None, "column", "whose equal values, in successive rows, are ranked together")
    bin_rows: int = field(262_144, "rows", "xgboost: bins are found in so many, drawn by row number", gt=1)
    memory: Literal["ram", "disk"] = field("ram", "", "xgboost: where the binned table is during the run")
