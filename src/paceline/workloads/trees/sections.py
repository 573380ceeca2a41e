"""Sections `model` and `data` of a run file of boosted trees, and the objectives both libraries support."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from paceline.config.sections import Section, conflict_error, field


class Task(Enum):
    BINARY = "binary"
    CLASSES = "multiclass"
    NUMBER = "regression"
    COUNT = "poisson"
    RANKING = "ranking"


@dataclass(frozen=True)
class Objective:
    task: Task
    xgboost: str
    xgboost_loss: str
    lightgbm: str
    lightgbm_loss: str

    @property
    def of_classes(self) -> bool:
        return self.task in (Task.BINARY, Task.CLASSES)


OBJECTIVES = {
    objective.task: objective
    for objective in (
        Objective(Task.BINARY, "binary:logistic", "logloss", "binary", "binary_logloss"),
        Objective(Task.CLASSES, "multi:softprob", "mlogloss", "multiclass", "multi_logloss"),
        Objective(Task.NUMBER, "reg:squarederror", "rmse", "regression", "l2"),
        Objective(Task.COUNT, "count:poisson", "poisson-nloglik", "poisson", "poisson"),
        Objective(Task.RANKING, "rank:ndcg", "ndcg", "lambdarank", "ndcg"),
    )
}
BY_NAME = {name: task for task, known in OBJECTIVES.items() for name in (known.xgboost, known.lightgbm)}
NAMES: Any = ("auto", *BY_NAME)


os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Waiting threads sleep: by default they spin, and a round takes ten times as long if other processes want the cores.
Torch reads this for all libraries when it is imported; a run file is read before that, and ranks inherit it."""
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
    learning_rate: float | None = field(
        None, "", "what each tree adds is multiplied by it; xgboost 0.3, lightgbm 0.1", gt=0, le=1
    )
    max_depth: int | None = field(None, "levels", "of a tree; xgboost 6, lightgbm no limit", gt=0, le=16)
    max_leaves: int | None = field(None, "leaves", "of a tree; xgboost no limit, lightgbm 31", gt=1, le=65536)
    min_child_weight: float | None = field(
        None, "sum of hessians", "that a leaf has at least; xgboost 1, lightgbm 0.001", ge=0
    )
    min_child_samples: int | None = field(None, "rows", "that a leaf has at least; lightgbm alone, 20", ge=0)
    gamma: float = field(0.0, "of the loss", "a split gains at least this", ge=0)
    reg_lambda: float | None = field(None, "", "L2 penalty on what leaves say; xgboost 1, lightgbm 0", ge=0)
    reg_alpha: float = field(0.0, "", "L1 penalty on what leaves say", ge=0)
    max_delta_step: float = field(0.0, "", "most that a leaf says, before the learning rate; 0 has no limit", ge=0)
    subsample: float = field(
        1.0, "fraction", "of the rows that a round sees, drawn by row number and round", gt=0, le=1
    )
    colsample_bytree: float = field(1.0, "fraction", "of the columns that a round sees, drawn by round", gt=0, le=1)
    max_bin: int | None = field(None, "bins", "of a column; xgboost 256, lightgbm 255", gt=1, le=65535)
    metric: str | None = field(
        None, "", "function of (labels, predictions) that gives a number, as file.py:function; asked at each evaluation"
    )
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
                raise conflict_error(
                    f"model.{name}: it cannot be chosen, since the answer would depend on the ranks or on a restart; "
                    "leave it out (rows and columns are drawn by model.subsample and model.colsample_bytree)"
                )
        return values

    @model_validator(mode="after")
    def _check_library(self) -> TreesModel:
        for name, library in ONE_LIBRARY.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.library != library:
                raise conflict_error(
                    f"model.{name} is a parameter of {library}, and model.library is {self.library}; leave one out"
                )
        return self


class TreesData(Section):
    """A table with a label column. Without a path, one is made up."""

    path: Path | None = field(
        None, "path", "table: .csv, .tsv, .parquet, .arrow, .feather or .npz; without it one is made up"
    )
    test_path: Path | None = field(None, "path", "table to test on; without it rows of the first are held out")
    test_fraction: float = field(0.2, "fraction", "of the rows held out, drawn by row number; 0 holds none", ge=0, lt=1)
    label: str = field("label", "column", "what is to be predicted")
    weight: str | None = field(None, "column", "how much a row counts")
    query: str | None = field(
        None, "column", "whose rows are ranked against each other; rows with the same value follow each other"
    )
    categories: tuple[str, ...] = field((), "columns", "whose values are names, not amounts")
    ignore: tuple[str, ...] = field((), "columns", "left out")
    rows: int = field(20_000, "rows", "of the table that is made up", gt=1)
    columns: int = field(12, "columns", "of the table that is made up", ge=4, le=4096)
    bin_rows: int = field(
        262_144, "rows", "xgboost: bins are found in so many rows, drawn by row number; else in all of them", gt=1
    )
    memory: Literal["ram", "disk"] = field("ram", "", "xgboost: where the binned table is during the run")
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of read tables, named by file, size and date")
