"""What trees can be asked to predict, under the names that both libraries have for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
