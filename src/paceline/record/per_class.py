"""Results of each class in an "evaluate" event, as rows and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.record.units import number

FEW = 12
"""Classes that are all shown; of more, those with the lowest F1."""
EACH = ("precision", "recall", "f1", "support")


@dataclass(frozen=True)
class ClassResult:
    """One class; None where nothing was there to divide by."""

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    """Samples of this class."""

    def cells(self) -> tuple[str, ...]:
        shown = ("–" if value is None else f"{value:.3f}" for value in (self.precision, self.recall, self.f1))
        return (self.name, *shown, number(self.support))


def class_results(event: Mapping[str, Any]) -> list[ClassResult]:
    """Of an evaluation; none where it was not one of classes."""
    columns: list[Any] = [event.get(name) for name in EACH]
    if not all(isinstance(column, list | tuple) for column in columns):
        return []
    rows = list(zip(*columns, strict=False))
    names = event.get("classes") or ()
    if len(names) != len(rows):  # of a workload that names none, or not all of them
        names = range(len(rows))
    return [ClassResult(str(name), *values) for name, values in zip(names, rows, strict=True)]


def shown_results(event: Mapping[str, Any]) -> tuple[Sequence[ClassResult], int]:
    """Those worth a line each, and how many are left out."""
    results = class_results(event)
    if len(results) <= FEW:
        return results, 0
    worst = sorted(results, key=lambda result: 1.0 if result.f1 is None else result.f1)
    return worst[:FEW], len(results) - FEW


def baseline_words(event: Mapping[str, Any]) -> str:
    """Where a constant answer would be right as often; empty otherwise."""
    accuracy, majority = event.get("accuracy"), event.get("majority")
    if accuracy is None or majority is None or accuracy > majority:
        return ""
    results = class_results(event)
    name = max(results, key=lambda result: result.support).name if results else "the most frequent class"
    return f"accuracy no better than always saying {name} ({majority:.3f})"
