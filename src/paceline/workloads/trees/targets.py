"""Choose the objective of a table's label, and encode labels for the libraries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.errors import UserError, join_names
from paceline.workloads.trees.sections import BY_NAME, OBJECTIVES, Objective, Task
from paceline.workloads.trees.table import TableFacts

AMBIGUOUS_VALUES = 20
"""Different whole numbers of a label that may be classes as well as amounts."""
MAX_RELEVANCE = 31
"""The gain of a row is 2 to this power."""


@dataclass(frozen=True)
class TreeTarget:
    objective: Objective
    classes: tuple[str, ...]
    """Names in the order of their numbers; empty where numbers are predicted."""
    values: tuple[float, ...]
    """The label's values of these classes."""

    @property
    def outputs(self) -> int:
        """Numbers that the trees of a round predict for a row."""
        return len(self.classes) if self.objective.task is Task.CLASSES else 1

    def labels(self, y: np.ndarray) -> np.ndarray:
        """Return labels for the libraries: classes are numbered from 0."""
        if not self.classes:
            return np.asarray(y)
        return np.searchsorted(np.array(self.values, y.dtype), y).astype(np.float32)


def choose_target(objective: str, label: str, facts: TableFacts) -> TreeTarget:
    """Return the target, or raise UserError if the label does not fit the objective."""
    task = _choose_task(objective, facts)
    if task is None:
        problem = (
            f"{label!r} holds {len(facts.values)} whole numbers ({_show_values(facts)}), which may be classes or "
            "amounts; type  model.objective=multiclass  or  model.objective=regression"
        )
    else:
        problem = _find_mismatch(task, label, facts)
    if task is None or problem:
        raise UserError(f"model.objective={objective}: {problem}", code="invalid-value", key="model.objective")
    if not OBJECTIVES[task].of_classes:
        return TreeTarget(OBJECTIVES[task], (), ())
    classes = facts.classes or tuple(f"{value:g}" for value in facts.values)
    return TreeTarget(OBJECTIVES[task], classes, facts.values)


def _choose_task(objective: str, facts: TableFacts) -> Task | None:
    """Return the task of an objective; None where `auto` cannot tell classes from amounts."""
    if objective != "auto":
        return BY_NAME[objective]
    if facts.queries:
        return Task.RANKING
    if facts.classes or len(facts.values) == 2:
        return Task.BINARY if len(facts.values) == 2 else Task.CLASSES
    return None if 0 < len(facts.values) <= AMBIGUOUS_VALUES and _are_whole(facts) else Task.NUMBER


def _find_mismatch(task: Task, label: str, facts: TableFacts) -> str:
    """Return why a label does not fit a task; empty where it does."""
    words = f"words ({join_names(facts.classes)})"
    if task is Task.RANKING:
        if not facts.queries:
            return "it ranks rows within queries; name their column as  data.query=COLUMN"
        if facts.classes or not facts.values or not _are_relevances(facts):
            held = words if facts.classes else f"numbers such as {_show_values(facts)}"
            return f"{label!r} holds {held}; relevance is a whole number from 0 to {MAX_RELEVANCE}"
        return ""
    if facts.queries:
        return "a table with data.query is ranked; use  model.objective=rank:ndcg  or leave data.query out"
    if task in (Task.BINARY, Task.CLASSES):
        if not facts.values:
            return f"{label!r} has more than a thousand different numbers, which are not classes"
        if not facts.classes and not _are_whole(facts):
            return f"{label!r} holds numbers ({_show_values(facts)}); use  model.objective=regression"
        if task is Task.BINARY and len(facts.values) != 2:
            return f"{label!r} has {len(facts.values)} classes; use  model.objective=multiclass"
        return ""
    if facts.classes:
        return f"{label!r} holds {words}; use  model.objective=auto  for their classes"
    if task is Task.COUNT and facts.totals["least"] < 0:
        return f"{label!r} has a value of {facts.totals['least']:g}; counts are 0 or more"
    return ""


def _are_relevances(facts: TableFacts) -> bool:
    return _are_whole(facts) and all(0 <= value <= MAX_RELEVANCE for value in facts.values)


def _are_whole(facts: TableFacts) -> bool:
    return all(float(value).is_integer() for value in facts.values)


def _show_values(facts: TableFacts) -> str:
    return join_names([f"{value:g}" for value in facts.values or (facts.totals["least"], facts.totals["mean"])], 3)
