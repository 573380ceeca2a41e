"""What a model says of new inputs: one row for each, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import UserError

PROBABILITIES = "probabilities"
NOT_WRITTEN = (PROBABILITIES, "logits")
"""Columns that a file has in another form, or not at all."""
SHOWN = 3


@dataclass(frozen=True, eq=False)
class Predictions:
    columns: Mapping[str, np.ndarray]
    """All that the workload's `predict` gave, by name."""
    classes: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def probabilities(self) -> np.ndarray:
        """(inputs, classes)"""
        if not self.of_classes:
            raise UserError(f"these predictions have no classes, but {', '.join(self.columns)}; take them by name")
        return self.columns[PROBABILITIES]

    @property
    def numbers(self) -> np.ndarray:
        """Of the likeliest class of each input."""
        return np.asarray(self.probabilities.argmax(1))

    @property
    def labels(self) -> list[str]:
        """The likeliest class of each input."""
        return [self.name_of(number) for number in self.numbers]

    def name_of(self, number: int) -> str:
        return self.classes[number] if number < len(self.classes) else str(number)

    @property
    def of_classes(self) -> bool:
        return PROBABILITIES in self.columns

    @property
    def pictures(self) -> dict[str, np.ndarray]:
        """The columns of pictures: bytes [H, W] or [H, W, 3] for each input, of one size or of several."""
        return {name: column for name, column in self.columns.items() if len(column) and _is_picture(column[0])}

    def rows(self) -> Iterator[dict[str, Any]]:
        """As a table has them: the label and its probability, then that of each class, then what else there is."""
        left_out = (*NOT_WRITTEN, *self.pictures)
        others = {name: column for name, column in self.columns.items() if name not in left_out and column.ndim < 3}
        for row in range(len(self)):
            found: dict[str, Any] = {}
            if self.of_classes:
                probabilities = self.probabilities[row]
                best = int(probabilities.argmax())
                found = {"predicted": self.name_of(best), "probability": float(probabilities[best])}
                found |= {f"p({self.name_of(i)})": float(p) for i, p in enumerate(probabilities)}
            yield {**found, **{name: column[row].tolist() for name, column in others.items()}}

    def __repr__(self) -> str:
        if not self.of_classes:
            shapes = ", ".join(f"{name} {list(column.shape)}" for name, column in self.columns.items())
            return f"Predictions({shapes})"
        best = self.probabilities[:SHOWN].max(1, initial=0.0)
        some = [f"{label} {p:.3f}" for label, p in zip(self.labels, best, strict=False)]
        more = [f"… {len(self) - SHOWN:,} more"] if len(self) > SHOWN else []
        return f"Predictions({', '.join([*some, *more])})"


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3)
