"""The protocols of a fit by passes and of its result."""

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
    AS_ASKED = "as asked"
    PATIENCE = "patience"


class Passes(Protocol):
    """One rank's part of a fit that goes through all samples until it has converged.

    A class may inherit what is optional: `parameters`, `begin`, `evaluate` and `close`.
    """

    samples: int
    most: int
    parameters: int | None = None

    @property
    def end(self) -> FitEnd | None:
        """None while there is more to do."""

    def end_words(self) -> str: ...

    def step(self, flag: bool) -> Mapping[str, Any]:
        """Make one pass; return its "loss", its times, whether a rank's `flagged`, and more for the event."""

    def begin(self) -> None:
        return

    def evaluate(self) -> Mapping[str, Any]:
        """Return metrics of held-out samples after a pass, if they are due."""
        return {}

    def close(self) -> None:
        """Release what ranks hold together, before one of them continues alone."""
        return

    def tensors(self) -> dict[str, Any]:
        """Return what resuming needs, by name; "model" holds the result."""

    def allocate_state(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors of these names and shapes, to read into what was saved beside `meta`."""

    def meta(self) -> dict[str, Any]: ...

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Take over the saved state, once it was read into the tensors of `allocate_state`."""

    def equations(self, ranks: int) -> list[str]: ...

    def conclude(self, result: "Mapping[str, Tensor]", folder: Path) -> None:
        """Write the result into the run's folder, for people; on the main rank, and safe to repeat."""


class Fitted(Protocol):
    """The result of a fit, for use on new inputs. Optional: `write_onnx(file)`."""

    @property
    def classes(self) -> Sequence[str]: ...

    def predict(self, inputs: Sequence[Any]) -> Mapping[str, Any]:
        """Return arrays by name, one row per input: "probabilities" of classes, …"""

    def export(self, folder: Path) -> None:
        """Write what loads without Paceline."""
