"""What a fit by passes answers while it goes on, and once it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class FitEnd(Enum):
    """Why a fit makes no more passes."""

    CONVERGED = "converged"
    MOST_PASSES = "most passes"
    """Before it has converged."""
    AS_ASKED = "as asked"
    """All that it was meant to do."""
    PATIENCE = "patience"


class Passes(Protocol):
    """One rank's part of a fit that goes through all samples again and again, until it has converged."""

    samples: int
    most: int

    @property
    def parameters(self) -> int | None:
        """None where what is fitted has none that are counted."""
        ...

    @property
    def end(self) -> FitEnd | None:
        """None while there is more to do."""
        ...

    def end_words(self) -> str:
        """The end and its numbers, for people."""
        ...

    def step(self, flag: bool) -> Mapping[str, Any]:
        """One pass: its "loss", its times, whether a rank's `flagged`, and what else is worth a line of the record."""
        ...

    def begin(self) -> None:
        """Make the first point, unless one was restored."""
        ...

    def evaluate(self) -> Mapping[str, Any]:
        """After a pass: metrics of held-out samples, where it is time for them."""
        ...

    def close(self) -> None:
        """No pass follows: what ranks hold together is let go, before one of them goes on alone."""
        ...

    def tensors(self) -> dict[str, Any]:
        """What resuming needs, by name. "model" holds the result."""
        ...

    def room(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of these names and shapes, into which what was saved beside `meta` is read."""
        ...

    def meta(self) -> dict[str, Any]:
        """The rest of what resuming needs, as plain values."""
        ...

    def restored(self, meta: Mapping[str, Any]) -> None:
        """Called once `room` holds what was saved."""
        ...

    def equations(self, ranks: int) -> list[str]: ...

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        """Write the whole result into the run's folder, for people. Done by the main rank; safe to do again."""
        ...


class Fitted(Protocol):
    """The result of a fit, for use on new inputs. Optional: `write_onnx(file)`."""

    @property
    def classes(self) -> Sequence[str]:
        """Names, where it tells classes apart."""
        ...

    def predict(self, inputs: Sequence[Any]) -> Mapping[str, Any]:
        """An array by name, one row per input: "probabilities" of classes, …"""
        ...

    def export(self, folder: Path) -> None:
        """Write what loads without Paceline."""
        ...
