"""What is learned from the labels of a table: which objective, and the labels as the libraries want them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.errors import UserError, join_names
from paceline.workloads.trees.sections import BY_NAME, OBJECTIVES, Objective, Task
from paceline.workloads.trees.table import TableFacts
from paceline.workloads.trees.table_builder import MOST_RELEVANT

FEW_NUMBERS = 20
"""Different whole numbers of a label that may be classes as well as amounts."""


@dataclass(frozen=True)
class TreeTarget:
    objective: Objective
    classes: tuple[str, ...]
    """Names in the order of their numbers; empty where numbers are predicted."""
    values: tuple[float, ...]
    """What the label holds where it is one of these classes."""

    @property
    def outputs(self) -> int:
        """Numbers that the trees of a round give for a row."""
        return len(self.classes) if self.objective.task is Task.CLASSES else 1

    def labels(self, y: np.ndarray) -> np.ndarray:
        """As the libraries want them: classes from 0."""
        if not self.classes:
            return np.asarray(y)
        return np.searchsorted(np.array(self.values, y.dtype), y).astype(np.float32)


def choose_target(asked: str, label: str, facts: TableFacts) -> TreeTarget:
    """UserError where the label cannot be what was asked for."""
    task = _task_of(asked, label, facts)
    given = f"model.objective={asked}"
    if (task is Task.RANKING) != bool(facts.queries):
        raise UserError(
            f"{given}: it ranks rows within queries; name their column as  data.query=COLUMN"
            if task is Task.RANKING
            else f"{given}: a table with data.query is ranked; use  model.objective=rank:ndcg  or leave data.query out"
        )
    if task in (Task.BINARY, Task.CLASSES):
        if not facts.values:
            raise UserError(f"{given}: {label!r} has more than a thousand different numbers, and these are no classes")
        whole = all(float(value).is_integer() for value in facts.values)
        if not facts.classes and not whole:
            raise UserError(f"{given}: {label!r} holds numbers ({_shown(facts)}); use  model.objective=regression")
        classes = facts.classes or tuple(f"{value:g}" for value in facts.values)
        if task is Task.BINARY and len(classes) != 2:
            raise UserError(f"{given}: {label!r} has {len(classes)} classes; use  model.objective=multiclass")
        return TreeTarget(OBJECTIVES[task], classes, facts.values)
    if task is Task.RANKING and not _are_relevances(facts):
        held = f"words ({join_names(facts.classes)})" if facts.classes else f"numbers such as {_shown(facts)}"
        raise UserError(f"{given}: {label!r} holds {held}; how relevant a row is must be a whole number from 0 to 31")
    if facts.classes:
        raise UserError(
            f"{given}: {label!r} holds words ({join_names(facts.classes)}); use  "
            "model.objective=auto  for their classes"
        )
    if task is Task.COUNT and facts.totals["least"] < 0:
        raise UserError(f"{given}: {label!r} is {facts.totals['least']:g} somewhere; counts are 0 or more")
    return TreeTarget(OBJECTIVES[task], (), ())


def _task_of(asked: str, label: str, facts: TableFacts) -> Task:
    if asked != "auto":
        return BY_NAME[asked]
    if facts.queries:
        return Task.RANKING
    if facts.classes or len(facts.values) == 2:
        return Task.BINARY if len(facts.values) == 2 else Task.CLASSES
    if 0 < len(facts.values) <= FEW_NUMBERS and all(float(value).is_integer() for value in facts.values):
        raise UserError(
            f"model.objective=auto: {label!r} holds {len(facts.values)} whole numbers ({_shown(facts)}), which may be "
            "classes or amounts; type  model.objective=multiclass  or  model.objective=regression"
        )
    return Task.NUMBER


def _are_relevances(facts: TableFacts) -> bool:
    whole = all(float(value).is_integer() and 0 <= value <= MOST_RELEVANT for value in facts.values)
    return bool(facts.values) and not facts.classes and whole


def _shown(facts: TableFacts) -> str:
    return join_names([f"{value:g}" for value in facts.values or (facts.totals["least"], facts.totals["mean"])], 3)
