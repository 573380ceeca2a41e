"""Which call of an optimiser ends a step of the script."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref


class SeveralOptimizers(Exception):
    """Two optimisers step in turn, and nobody said which of them ends a step."""

    def __init__(self, names: list[str], last: str) -> None:
        self.names, self.last = names, last


class StepEnds:
    """Follows the calls of `step`, of which some are made inside others: an optimiser may wrap another."""

    def __init__(self, steps_by: str = "") -> None:
        self.steps_by = steps_by
        self.names: list[str] = []
        """Adam, Adam-2, …: in the order of their first steps."""
        self._name_of: dict[ReferenceType[Any], str] = {}
        self._last = ""
        self._inside: list[Any] = []

    def begins(self, optimizer: Any) -> None:
        self._leave(optimizer)  # it may be there still: a step that raised an exception has no end
        self._inside.append(optimizer)

    def ends(self, optimizer: Any) -> bool:
        """Whether a step of the script ends with this call."""
        self._leave(optimizer)
        if self._inside:
            return False
        name = self._name_of.get(ref(optimizer)) or self._named(optimizer)
        if self.steps_by:
            return name == self.steps_by
        again = name != self._last and self._stepped_before(name)
        self._last, last = name, self._last
        if again:
            raise SeveralOptimizers(self.names, last)
        return True

    def _stepped_before(self, name: str) -> bool:
        return bool(self._last) and self.names.index(name) < self.names.index(self._last)

    def _leave(self, optimizer: Any) -> None:
        if optimizer in self._inside:
            del self._inside[self._inside.index(optimizer) :]

    def _named(self, optimizer: Any) -> str:
        kind = type(optimizer).__name__
        same = sum(name.partition("-")[0] == kind for name in self.names)
        self.names.append(f"{kind}-{same + 1}" if same else kind)
        self._name_of[ref(optimizer)] = self.names[-1]
        return self.names[-1]
