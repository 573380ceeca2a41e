"""Inputs of `paceline predict`, and the predictions of a model: one row for each input, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import iter_lines
from paceline.data.tables import TABLE_KINDS, check_columns, iter_rows
from paceline.errors import UserError, did_you_mean

TABLE_SUFFIXES = {**TABLE_KINDS, ".txt": "txt"}
PROBABILITIES = "probabilities"
NOT_WRITTEN = (PROBABILITIES, "logits")
SHOWN = 3


@dataclass(frozen=True)
class PredictInputs:
    values: list[Any]
    rows: list[dict[str, Any]]


def read_inputs(words: Sequence[str], column: str = "", usual: str = "") -> PredictInputs:
    """Read texts as they are; of a table, a named column, else the `usual` one, else each row as a dict."""
    tables = [word for word in words if _table_kind(word)]
    if not tables:
        if usual and (others := [word for word in words if _is_file(word)]):
            message = f"{others[0]!r} is a file, and this model reads texts; give a text or a table "
            raise UserError(f"{message}({', '.join(TABLE_SUFFIXES)})", code="invalid-value", key="inputs")
        values = [Path(word) if _is_file(word) else word for word in words]
        return PredictInputs(values, [{"input": str(word)} for word in words])
    if len(words) > 1:
        raise UserError(f"{tables[0]!r} is a table; give it alone", code="conflict", key="inputs")
    path = Path(tables[0])
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, beside)
        raise UserError(f"there is no file {str(path)!r}{hint}", code="not-found", key="inputs")
    kind = _table_kind(tables[0])
    lines = (line.rstrip("\r\n") for line in iter_lines(path)) if kind == "txt" else ()
    rows = [{"text": line} for line in lines if line.strip()] if kind == "txt" else list(iter_rows(path, kind))
    if not rows:
        raise UserError(f"{path}: there are no rows", code="invalid-data", key="inputs")
    wanted = column or ("text" if kind == "txt" else usual)
    if not wanted:
        return PredictInputs(list(rows), rows)
    for number, row in enumerate(rows, 1):
        check_columns({"--column": wanted}, row, f"{path} row {number}")
    return PredictInputs([row[wanted] for row in rows], rows)


def _table_kind(word: str) -> str:
    """Return the kind of table that a word names, or ""; a text may end like a table, but has a space somewhere."""
    name = word.removesuffix(".gz").lower()
    found = next((kind for suffix, kind in TABLE_SUFFIXES.items() if name.endswith(suffix)), "")
    return found if found and (_is_file(word) or not any(map(str.isspace, word))) else ""


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with an invalid character
        return False


@dataclass(frozen=True, eq=False)
class Predictions:
    columns: Mapping[str, np.ndarray]
    classes: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def probabilities(self) -> np.ndarray:
        """(inputs, classes)"""
        if not self.of_classes:
            message = f"these predictions have no classes, but {', '.join(self.columns)}; take them by name"
            raise UserError(message, code="not-supported", key=PROBABILITIES)
        return self.columns[PROBABILITIES]

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.probabilities.argmax(1))

    @property
    def labels(self) -> list[str]:
        return [self.name_of(number) for number in self.numbers]

    def name_of(self, number: int) -> str:
        return self.classes[number] if number < len(self.classes) else str(number)

    @property
    def of_classes(self) -> bool:
        return PROBABILITIES in self.columns

    @property
    def pictures(self) -> dict[str, np.ndarray]:
        """The columns of pictures: bytes [H, W] or [H, W, 3] for each input."""
        return {name: column for name, column in self.columns.items() if len(column) and _is_picture(column[0])}

    def rows(self) -> Iterator[dict[str, Any]]:
        omitted = (*NOT_WRITTEN, *self.pictures)
        others = {name: column for name, column in self.columns.items() if name not in omitted and column.ndim < 3}
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
