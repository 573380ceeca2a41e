"""Functions of the user's that a run file names: what fails in them is said as such, with its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import UserError
from paceline.registry import one_line, own_trace

MOST_LINES = 3
"""Of what Keras says of shapes that do not fit: all that matters is in the first ones."""


@contextmanager
def own_code(key: str, reference: str) -> Iterator[None]:
    """A call of the function `reference`, which the field `key` names."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = f"{key}: {reference} fails: {one_line(error)}"
        raise UserError(f"{said}\n\n{own_trace(error, reference)}".rstrip()) from error


@contextmanager
def fitting_together() -> Iterator[None]:
    """The model is called with the samples for the first time."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = " ".join(line.strip() for line in str(error).strip().splitlines()[:MOST_LINES])
        raise UserError(
            f"the model, its loss and its data do not fit together: {type(error).__name__}: {told}"
        ) from error
