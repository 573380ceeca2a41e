"""What members said of rows, as files in the ensemble's folder: a run that goes on after a kill finds them there."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.npz_file import open_npz
from paceline.errors import UserError
from paceline.record.files import write_atomic
from paceline.workloads.ensemble.combining import logs_of
from paceline.workloads.ensemble.members import Outputs


@dataclass(frozen=True)
class Answers:
    folder: Path

    def file(self, member: str, rows: str) -> Path:
        return self.folder / f"{member}-{rows}.npz"

    def has(self, member: str, rows: str) -> bool:
        return self.file(member, rows).exists()

    def write(self, member: str, rows: str, found: Outputs) -> None:
        content = io.BytesIO()
        np.savez_compressed(content, values=found.values, classes=np.array(found.classes, str))
        self.folder.mkdir(exist_ok=True)
        write_atomic(self.file(member, rows), content.getvalue())

    def read(self, member: str, rows: str) -> Outputs:
        file = self.file(member, rows)
        try:
            with open_npz(file) as found:
                return Outputs(found["values"], tuple(found["classes"].tolist()))
        except (UserError, KeyError):
            raise UserError(f"{file} is damaged or gone; remove it, and train the ensemble again") from None


def truth_of(labels: Sequence[str], classes: Sequence[str], label: str) -> np.ndarray:
    """Numbers of classes or, where there are none, numbers."""
    if classes:
        place = {name: number for number, name in enumerate(classes)}
        return np.array([place[word] for word in labels], np.int64)
    try:
        return np.array([float(word) for word in labels])
    except ValueError:
        raise UserError(f"the members predict numbers, and {label!r} holds words; give another data.label") from None


def mean_loss(found: np.ndarray, truth: np.ndarray) -> float:
    """Log loss of probabilities, mean square of numbers."""
    if found.ndim == 2:
        return -float(logs_of(found)[np.arange(len(truth)), truth].mean())
    return float(((found - truth) ** 2).mean())
