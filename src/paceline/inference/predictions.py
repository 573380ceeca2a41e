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


@dataclass(frozen=True)
class PredictInputs:
    values: list[Any]
    """What the workload encodes."""
    rows: list[dict[str, Any]]
    """What is written beside each prediction."""


def read_inputs(words: Sequence[str], column: str = "", usual: str = "") -> PredictInputs:
    """Texts as they are; of a table, the column that is named, else the usual one, else each row as a dict."""
    tables = [word for word in words if _table_kind(word)]
    if not tables:
        if usual and (others := [word for word in words if _is_file(word)]):
            raise UserError(
                f"{others[0]!r} is a file, and this model reads texts; give a table "
                f"({', '.join(TABLE_SUFFIXES)}) or a text"
            )
        values = [Path(word) if _is_file(word) else word for word in words]
        return PredictInputs(values, [{"input": str(word)} for word in words])
    if len(words) > 1:
        raise UserError(f"{tables[0]!r} is a table; give it alone, or texts without it")
    path = Path(tables[0])
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"there is no file {str(path)!r}{did_you_mean(path.name, beside)}")
    kind = _table_kind(tables[0])
    rows = list(_read_lines(path) if kind == "txt" else iter_rows(path, kind))
    if not rows:
        raise UserError(f"{path}: there are no rows")
    wanted = column or ("text" if kind == "txt" else usual)
    if not wanted:
        return PredictInputs(list(rows), rows)
    for number, row in enumerate(rows, 1):
        check_columns({"--column": wanted}, row, f"{path} row {number}")
    return PredictInputs([row[wanted] for row in rows], rows)


def _table_kind(word: str) -> str:
    """What a word that names a table says of it; a text may end like one, but has a space somewhere."""
    name = word.removesuffix(".gz").lower()
    found = next((kind for suffix, kind in TABLE_SUFFIXES.items() if name.endswith(suffix)), "")
    return found if found and (_is_file(word) or not any(map(str.isspace, word))) else ""


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with a sign that none has
        return False


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from ({"text": line.rstrip("\r\n")} for line in iter_lines(path) if line.strip())


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
