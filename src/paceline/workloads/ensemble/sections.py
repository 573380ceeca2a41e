"""Run file sections of an ensemble: its members, and the table that their weights are fitted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from paceline.config import RunSpec
from paceline.config.sections import Section, conflict_error, field
from paceline.errors import UserError

Combine = Literal["average", "weighted", "stack"]
FEW = "an ensemble has two members or more, as in  model.members=[trees.yaml,net.yaml]  or  model.runs=[runs/a,runs/b]"
Calibrate = Literal["none", "temperature", "platt", "isotonic"]


class EnsembleModel(Section):
    """Several models of one table, and how their predictions are combined."""

    run_files = ("members",)

    members: tuple[Path, ...] = field((), "run files", "trained here: once for each fold, and once on all rows")
    runs: tuple[Path, ...] = field((), "run folders", "finished runs, instead of members")
    combine: Combine = field(
        "stack", "", "average of probabilities; weighted average; stack is a logistic regression on log-probabilities"
    )
    calibrate: Calibrate = field(
        "temperature",
        "",
        "of probabilities: by one factor; platt adds a shift per class; isotonic is any rising curve",
    )

    @model_validator(mode="after")
    def _members_or_runs(self) -> EnsembleModel:
        if self.members and self.runs:
            raise conflict_error(
                "model.members are trained here and model.runs are finished; give one of them (a finished run has "
                "seen the rows of all folds)"
            )
        key = "members" if self.members else "runs"
        given = getattr(self, key)
        if len(given) == 1:
            raise conflict_error(f"model.{key}: {given[0]} is alone, and {FEW}")
        if twice := [path for number, path in enumerate(given) if path in given[:number]]:
            raise conflict_error(f"model.{key}: {twice[0]} is given twice; leave one out")
        return self


class EnsembleData(Section):
    """A table with a label column. For finished runs, one that none of them learned from."""

    path: Path | None = field(
        None, "path", "table: .csv, .tsv, .jsonl or .parquet; by default the test table of finished runs"
    )
    test_path: Path | None = field(None, "path", "table to test on; without it rows of the first are held out")
    test_fraction: float | None = field(
        None, "fraction", "of the rows held out, drawn by row number; none is 0.2, or 0.5 for finished runs", gt=0, lt=1
    )
    label: str = field("label", "column", "what is to be predicted")
    folds: int = field(5, "folds", "of model.members: each is predicted by models trained on the others", ge=2)


def build_ensemble_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> Any:
    raise UserError(
        "an ensemble costs what its members cost, each as often as there are folds and once more; "
        "plan each of them with  paceline plan MEMBER.yaml"
    )
