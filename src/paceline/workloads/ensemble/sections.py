"""Run file sections of an ensemble: its members, and the table that their weights are fitted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from paceline.config import RunSpec
from paceline.config.sections import Section, conflict_error, field
from paceline.errors import UserError

Combine = Literal["average", "weighted", "stack"]
FEW = "give two members or more, as  model.members=[trees.yaml,net.yaml]  or  model.runs=[runs/a,runs/b]"
Calibrate = Literal["none", "temperature"]


class EnsembleModel(Section):
    """Several models of one table, and how their predictions are combined."""

    run_files = ("members",)

    members: tuple[Path, ...] = field((), "run files", "trained here: once for each fold, and once on all rows")
    runs: tuple[Path, ...] = field((), "run folders", "finished runs, instead of members")
    combine: Combine = field("stack", "", "probabilities by mean or weighted mean; stack: a logistic regression")
    calibrate: Calibrate = field("temperature", "", "one factor of the log-probabilities of each member, and of all")

    @model_validator(mode="after")
    def _members_or_runs(self) -> EnsembleModel:
        if self.members and self.runs:
            raise conflict_error("model.members are trained here, model.runs are finished; give one of them")
        key = "members" if self.members else "runs"
        given = getattr(self, key)
        if len(given) == 1:
            raise conflict_error(f"model.{key}: {given[0]} is alone; {FEW}")
        return self


class EnsembleData(Section):
    """A table with a label column. For finished runs, one that none of them learned from."""

    path: Path | None = field(None, "path", ".csv, .tsv, .jsonl or .parquet")
    test_path: Path | None = field(None, "path", "table to test on; without it rows of the first are held out")
    test_fraction: float | None = field(None, "fraction", "of rows held out; none is 0.2, for runs 0.5", gt=0, lt=1)
    label: str | None = field(None, "column", "what is to be predicted; none is the label of the members")
    folds: int = field(5, "folds", "of model.members: each is predicted by models trained on the others", ge=2)


def build_ensemble_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> Any:
    raise UserError("each member costs one run per fold and one more; plan it with  paceline plan MEMBER.yaml")
