"""The models of an ensemble: finished runs of any workload, each asked about rows in the way that it understands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.table import word
from paceline.errors import UserError, listed
from paceline.plain_files import read_bytes
from paceline.record.events import Status
from paceline.record.run_dir import RunDir
from paceline.record.summary import read_summary
from paceline.training.checkpoints.saved import MANIFEST, sealed_in
from paceline.using.trained import FittedModel, TrainedModel
from paceline.using.trained import open as open_run

NUMBERS = "predicted"
"""What a model calls the numbers that it predicts."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model says of rows: (rows, classes) or, where it predicts numbers, (rows,)."""

    values: np.ndarray
    classes: tuple[str, ...]

    def aligned(self, classes: Sequence[str], who: str) -> np.ndarray:
        """With its columns in this order; UserError where these are not the classes that it knows."""
        if set(classes) != set(self.classes):
            told = [f"{listed(some) if some else 'numbers'}" for some in (self.classes, classes)]
            raise UserError(f"{who} predicts {told[0]}, and the members before it {told[1]}; these cannot become one")
        return self.values[:, [self.classes.index(name) for name in classes]] if classes else self.values


@dataclass(frozen=True, eq=False)
class Member:
    name: str
    model: TrainedModel | FittedModel

    @classmethod
    def open(cls, name: str, path: Path) -> Member:
        return cls(name, open_run(check_finished(path).path))

    def outputs(self, blocks: Iterable[Sequence[Any]]) -> Outputs:
        """Of rows by the names of their columns, or of texts."""
        found = [self._some(block) for block in blocks]
        return Outputs(np.concatenate([one.values for one in found]), found[0].classes)

    def _some(self, block: Sequence[Any]) -> Outputs:
        found = self.model.predict([self._taken(row) for row in block])
        if found.of_classes:
            names = [word(found.name_of(number)) for number in range(found.probabilities.shape[1])]
            return Outputs(found.probabilities.astype(np.float64), tuple(names))
        if NUMBERS in found.columns and found[NUMBERS].ndim == 1:
            return Outputs(found[NUMBERS].astype(np.float64), ())
        raise UserError(
            f"{self.name} predicts {listed(list(found.columns))}; a member of an ensemble predicts probabilities of "
            f"classes, or numbers as {NUMBERS!r}"
        )

    def _taken(self, row: Any) -> Any:
        """A model of texts gets the text; others get the row."""
        text = str(getattr(self.model.workload.spec.data, "text", ""))
        if not text or not isinstance(row, Mapping):
            return row
        if text not in row:
            there = listed([str(name) for name in row], 12)
            raise UserError(f"the rows have no column {text!r}, which {self.name} reads (there: {there})")
        return "" if row[text] is None else str(row[text])


def check_finished(path: Path) -> RunDir:
    run = RunDir.open(path)
    status = "not finished"
    with suppress(UserError):
        status = read_summary(run.summary_file).status
    if status != Status.FINISHED:
        raise UserError(f"{path} is {status}; go on with  paceline train --resume {path}")
    return run


def digest_of_run(path: Path) -> str:
    """Of its newest checkpoint, by the checksums that it was sealed with, and of what the run keeps for using it."""
    run = RunDir(path)
    sealed = sealed_in(run.checkpoints)
    if not sealed:
        raise UserError(f"{path} has no checkpoint; go on with  paceline train --resume {path}")
    whole = hashlib.sha256(read_bytes(sealed[0] / MANIFEST))
    for file in sorted(path for path in run.kept.rglob("*") if path.is_file()):
        whole.update(str(file.relative_to(run.kept)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def names_of(paths: Sequence[Path]) -> list[str]:
    """Of the files or folders, each once."""
    found: list[str] = []
    for path in paths:
        stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
        count = sum(name == stem or name.startswith(f"{stem}-") for name in found)
        found.append(f"{stem}-{count + 1}" if count else stem)
    return found
