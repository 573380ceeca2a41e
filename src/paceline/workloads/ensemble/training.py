"""Members that are trained here: on all rows, and for each fold on the others, through the same door as any run.

No row that a member is asked about has had a part in its training. Where `train.patience` looks at held-out rows to
decide when to stop, these are rows of a fold of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError, UserError
from paceline.record.events import Status
from paceline.spec import RunSpec, load
from paceline.training.run import train
from paceline.workloads.ensemble.rows import RowSet, kind_of

SOURCES = {"csv": "csv", "tsv": "csv", "jsonl": "jsonl", "parquet": "parquet"}
"""What `data.source` of a member calls a kind of table."""


@dataclass(frozen=True)
class MemberFile:
    """The run file of a member."""

    name: str
    file: Path
    spec: RunSpec
    ignored: tuple[str, ...] = ()
    """Columns that other members read as texts."""

    @property
    def stops_early(self) -> bool:
        return self.spec.train.patience > 0

    def on(self, learn: Path, test: Path, label: str, cache: Path | None = None) -> RunSpec:
        """Its run on these tables."""
        known = type(self.spec.data).model_fields
        values: dict[str, Any] = {"name": self.name, "data.path": str(learn), "data.test_path": str(test)}
        usual = {"label": label, "source": SOURCES[kind_of(learn)]}
        if cache is not None:
            usual["cache"] = str(cache)
        values |= {f"data.{key}": value for key, value in usual.items() if key in known}
        if "ignore" in known and self.ignored:
            data: Any = self.spec.data
            known_here = (*data.ignore, *getattr(data, "categories", ()))
            values["data.ignore"] = [*data.ignore, *(name for name in self.ignored if name not in known_here)]
        return self.spec.replace(values, "the ensemble")


def member_files(files: Sequence[Path], names: Sequence[str]) -> list[MemberFile]:
    specs = [load(file) for file in files]
    for file, spec in zip(files, specs, strict=True):
        if missing := [key for key in ("path", "test_path") if key not in type(spec.data).model_fields]:
            raise UserError(
                f"model.members: {file} has no data.{missing[0]}, by which it would be told what to learn from; give "
                "its workload the fields  path  and  test_path  in Data"
            )
    texts = {str(spec.data.text) for spec in specs if hasattr(spec.data, "text")}
    return [MemberFile(*one, tuple(sorted(texts))) for one in zip(names, files, specs, strict=True)]


@dataclass(frozen=True)
class Folds:
    """The rows to learn from, dealt out."""

    rows: RowSet
    fold: np.ndarray
    count: int
    test: RowSet

    def split(self, member: MemberFile, fold: int | None) -> tuple[RowSet, RowSet]:
        """(to learn from, to evaluate on) of a member, for a fold that it must not see or, without one, for good."""
        if fold is None:
            apart = 0 if member.stops_early else None
        else:
            apart = (fold + 1) % self.count if member.stops_early else fold
        away = [number for number in (fold, apart) if number is not None]
        learn = self.rows.some(~np.isin(self.fold, away))
        return learn, self.test if apart is None else self.rows.some(self.fold == apart)

    def of(self, fold: int) -> RowSet:
        return self.rows.some(self.fold == fold)


def check_folds(folds: Folds, label: str) -> None:
    """Every class must be learned from, whatever fold is away."""
    words = np.array(folds.rows.labels)
    if len(set(folds.rows.labels)) > max(20, len(words) // 10):
        return  # numbers
    for name in sorted(set(folds.rows.labels)):
        there = folds.fold[words == name]
        if len(set(there)) < min(3, folds.count):
            count = f"{len(there)} row" if len(there) == 1 else f"{len(there)} rows"
            raise UserError(
                f"{label!r} is {name!r} in {count}, too few for data.folds={folds.count}: a model that is trained "
                "without a fold would not know it; leave it out"
            )


def trained(spec: RunSpec, out: Path) -> tuple[Path, bool]:
    """(its run folder, whether it is finished): begun, or gone on with where it was left."""
    try:
        result = train(spec, out, again=True, show=False)
    except PacelineError as error:
        error.args = (f"member {spec.name}: {error}",)
        raise
    return result.path, result.status == Status.FINISHED


def written(rows: RowSet, folder: Path, name: str) -> Path:
    """The table of these rows, once it is whole."""
    if there := [file for file in folder.glob(f"{name}.*") if file.is_file()]:
        return there[0]
    file = rows.write(folder, f"writing-{name}")
    return file.rename(file.with_name(f"{name}{file.suffix}"))
