"""An evaluation of the user's own: a function of the labels and the predictions of all held-out rows.

It is called once, by the main rank, with the rows in their order, and is so the same on any number of ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.launch.group import from_main, gather_objects
from paceline.registry import function_of, one_line, own_trace
from paceline.workloads.trees.scoring import HeldOutRows, probabilities

KEY = "model.metric"


@dataclass(frozen=True)
class OwnMetric:
    reference: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.reference.rpartition(":")[2]

    def of(self, held_out: HeldOutRows, margins: np.ndarray) -> float:
        """From what the trees say of this rank's held-out rows."""
        margins = np.concatenate(gather_objects(margins))
        return from_main(lambda: self._asked(held_out, margins))

    def _asked(self, held_out: HeldOutRows, margins: np.ndarray) -> float:
        """Classes are numbers from 0; of two, a prediction is the probability of the second."""
        said, target = probabilities(margins, held_out.target), held_out.target
        labels = target.labels(held_out.split.y)
        try:
            found = self.function(
                labels.astype(np.int64) if target.classes else np.array(labels),
                said[:, 1] if len(target.classes) == 2 else said,
            )
        except Exception as error:
            told = f"{KEY}: {self.reference} fails: {one_line(error)}"
            raise UserError(f"{told}\n\n{own_trace(error, self.reference)}".rstrip()) from error
        if not isinstance(found, Real) or not math.isfinite(found):
            raise UserError(f"{KEY}: {self.reference} returned {found!r}; it must return a finite number")
        return float(found)


def own_metric(reference: str | None) -> OwnMetric | None:
    if reference is None:
        return None
    function = function_of(reference, KEY)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserError(f"{KEY}: {reference} is called with (labels, predictions): {error}") from None
    except ValueError:  # a function of C, of which nobody knows what it takes
        pass
    return OwnMetric(reference, function)
