"""Sections `model` and `data` of a run file of boosted trees, and what the libraries call their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from paceline.config.sections import Section, TableData, conflict_error, field
from paceline.data.prepared_table import Task
from paceline.io.safe_yaml import load_yaml

LIBRARIES: dict[str, Any] = load_yaml(Path(__file__).with_name("libraries.yaml").read_text(encoding="utf-8"))
OBJECTIVES: dict[Task, dict[str, str]] = {Task(name): known for name, known in LIBRARIES["objectives"].items()}
BY_NAME = {known[library]: task for task, known in OBJECTIVES.items() for library in ("xgboost", "lightgbm")}
NAMES: Any = ("auto", *BY_NAME)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Waiting threads sleep instead of spinning: rounds are ten times faster where processes share cores. Torch reads it
when imported, which is after a run file is read; ranks inherit it."""


class TreesModel(Section):
    """A sum of trees, each grown on the residual of those before it. None is the library's own default."""

    references = ("metric",)

    library: Literal["xgboost", "lightgbm"] = field("xgboost", "", "xgboost on any number of ranks, lightgbm on one")
    objective: Literal[NAMES] = field(  # type: ignore[valid-type]
        "auto", "", "what is predicted; auto looks at the label (two values, words, or numbers) and at data.query"
    )
    learning_rate: float | None = field(None, "", "scales each tree; xgboost 0.3, lightgbm 0.1", gt=0, le=1)
    max_depth: int | None = field(None, "levels", "of a tree; xgboost 6, lightgbm no limit", gt=0, le=16)
    max_leaves: int | None = field(None, "leaves", "of a tree; xgboost no limit, lightgbm 31", gt=1, le=65536)
    min_child_weight: float | None = field(
        None, "sum of hessians", "at least in a leaf; xgboost 1, lightgbm 0.001", ge=0
    )
    min_child_samples: int | None = field(None, "rows", "at least in a leaf; lightgbm alone, 20", ge=0)
    gamma: float = field(0.0, "of the loss", "a split gains at least this", ge=0)
    reg_lambda: float | None = field(None, "", "L2 penalty on what leaves say; xgboost 1, lightgbm 0", ge=0)
    reg_alpha: float = field(0.0, "", "L1 penalty on what leaves say", ge=0)
    max_delta_step: float = field(0.0, "", "most that a leaf says, before the learning rate; 0 has no limit", ge=0)
    subsample: float = field(1.0, "fraction", "of rows in a round, drawn by row number and round", gt=0, le=1)
    colsample_bytree: float = field(1.0, "fraction", "of columns in a round, drawn by round", gt=0, le=1)
    max_bin: int | None = field(None, "bins", "of a column; xgboost 256, lightgbm 255", gt=1, le=65535)
    metric: str | None = field(None, "", "function of (labels, predictions) for evaluations, as file.py:function")
    scale_pos_weight: float = field(1.0, "", "weight of the second of two classes", gt=0)
    grow_policy: Literal["depthwise", "lossguide"] = field(
        "depthwise", "", "xgboost alone: level by level, or where the loss falls most"
    )

    @model_validator(mode="before")
    @classmethod
    def _translate_library_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, Mapping) else ():
            if here := next((key for key, names in LIBRARIES["names"].items() if name in names), ""):
                raise conflict_error(f"model.{name}: here it is called {here}; type  {here}={values[name]}")
            if name in LIBRARIES["fixed"]:
                raise conflict_error(f"model.{name}: the trees would depend on the ranks; leave it out")
        return values

    @model_validator(mode="after")
    def _check_library(self) -> TreesModel:
        for name, library in LIBRARIES["one_library"].items():
            if getattr(self, name) != type(self).model_fields[name].default and self.library != library:
                raise conflict_error(f"model.{name} is for {library}, not model.library={self.library}; leave it out")
        return self


class TreesData(TableData):
    """A table with a label column; without a path, a synthetic one."""

    query: str | None = field(None, "column", "whose equal values, in successive rows, are ranked together")
    bin_rows: int = field(262_144, "rows", "xgboost: bins are found in so many, drawn by row number", gt=1)
    memory: Literal["ram", "disk"] = field("ram", "", "xgboost: where the binned table is during the run")
