"""Trees that are there: kept in the run's folder, asked about new rows, and written for use without Paceline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.registry import describe_error
from paceline.errors import UserError, join_names
from paceline.io.files import read_sealed, validate_fields, write_atomic, write_sealed
from paceline.io.safe_open import read_bytes
from paceline.workloads.trees.models import check_model, strip_lightgbm_model
from paceline.workloads.trees.scoring import predict_from_margins
from paceline.workloads.trees.sections import OBJECTIVES, Task
from paceline.workloads.trees.table import Coding, encode_rows
from paceline.workloads.trees.table_source import Column, encode_words
from paceline.workloads.trees.targets import TreeTarget

MODEL = {"xgboost": "model.json", "lightgbm": "model.txt"}
ABOUT = "table.json"
MOST_BYTES = 1 << 34
"""Of a model."""


def cut_model(library: str, raw: bytes, rounds: int) -> bytes:
    """The trees of the first rounds, in the library's own text."""
    if library == "xgboost":
        import xgboost

        booster = xgboost.Booster(model_file=bytearray(raw))
        return bytes(booster[:rounds].save_raw("json"))
    import lightgbm

    text: str = lightgbm.Booster(model_str=raw.decode()).model_to_string(num_iteration=rounds)
    return text.encode()


@dataclass(frozen=True)
class FittedTrees:
    library: str
    raw: bytes
    """In the library's own text."""
    coding: Coding
    target: TreeTarget

    def write(self, folder: Path) -> None:
        """The model in the library's own format, and what its numbers mean."""
        write_atomic(folder / MODEL[self.library], self.raw)
        about = {
            "library": self.library,
            "objective": self.target.objective.task.value,
            "classes": list(self.target.classes),
            "values": list(self.target.values),
            "columns": list(self.coding.columns),
            "categories": self.coding.categories,
            "sha256": hashlib.sha256(self.raw).hexdigest(),
        }
        write_sealed(folder / ABOUT, about)

    @classmethod
    def read(cls, folder: Path) -> FittedTrees:
        if not (folder / ABOUT).exists():
            raise UserError(f"{folder} has no trees yet; go on with  paceline train --resume {folder}")
        about = read_sealed(folder / ABOUT)
        file, again = folder / ABOUT, f"paceline train --resume {folder}"
        try:
            task, library = Task(about["objective"]), about["library"]
            facts = validate_fields(TreeTarget, {name: about[name] for name in ("classes", "values")})
            coding = Coding(**validate_fields(Coding, {name: about[name] for name in ("columns", "categories")}))
            target = TreeTarget(OBJECTIVES[task], **facts)
            _check_names(coding, target)
            file = folder / MODEL[library]
            raw = read_bytes(file, MOST_BYTES)
            if about.get("sha256", "") not in ("", hashlib.sha256(raw).hexdigest()):
                raise ValueError("its checksum differs")
            check_model(library, raw, len(coding.columns), target.outputs)
            return cls(library, raw, coding, target)
        except (KeyError, ValueError, TypeError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{file} is damaged ({why}); write it again with  {again}") from None

    @property
    def classes(self) -> Sequence[str]:
        return self.target.classes

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Of rows, each by the names of its columns."""
        found = self.said(self.numbers(rows))
        return {"probabilities": found} if self.target.classes else {"predicted": found}

    def said(self, X: np.ndarray) -> np.ndarray:
        """Of rows that are coded: probabilities of classes, or numbers."""
        return predict_from_margins(self.margins(X), self.target)

    def margins(self, X: np.ndarray) -> np.ndarray:
        return self._asked(X, {"output_margin": True}, {"raw_score": True}).reshape(len(X), self.target.outputs)

    def contributions(self, X: np.ndarray) -> np.ndarray:
        """SHAP values: what each column adds to the margins of these rows, (rows, outputs, columns)."""
        found = self._asked(X, {"pred_contribs": True}, {"pred_contrib": True})
        return found.reshape(len(X), self.target.outputs, -1)[:, :, :-1]  # the last one is the same for all rows

    def _asked(self, X: np.ndarray, of_xgboost: Mapping[str, Any], of_lightgbm: Mapping[str, Any]) -> np.ndarray:
        booster = self._booster
        if self.library == "lightgbm":
            with _refusals(self.library):
                return np.asarray(booster.predict(X, **of_lightgbm))
        from paceline.workloads.trees.xgboost_rounds import build_dmatrix

        rows = build_dmatrix(X, self.coding, 0)
        with _refusals(self.library):
            return np.asarray(booster.predict(rows, **of_xgboost))

    @cached_property
    def _booster(self) -> Any:
        if self.library == "xgboost":
            import xgboost

            with _refusals(self.library):
                return xgboost.Booster(model_file=bytearray(self.raw))
        import lightgbm

        with _refusals(self.library):
            return lightgbm.Booster(model_str=strip_lightgbm_model(self.raw))

    @property
    def rounds(self) -> int:
        booster = self._booster
        return int(booster.num_boosted_rounds() if self.library == "xgboost" else booster.current_iteration())

    @property
    def leaves(self) -> int:
        """Of all trees."""
        if self.library == "lightgbm":
            return sum(tree["num_leaves"] for tree in self._booster.dump_model()["tree_info"])
        trees = json.loads(self.raw)["learner"]["gradient_booster"]["model"]["trees"]
        return sum(tree["left_children"].count(-1) for tree in trees)

    def numbers(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Rows as they are coded for these trees."""
        if wrong := [row for row in rows if not isinstance(row, Mapping)]:
            known = join_names(self.coding.columns, 12)
            raise UserError(f"{wrong[0]!r:.80} is not a row: trees are asked about values by column ({known})")
        if missing := [name for name in self.coding.columns if not any(name in row for row in rows)]:
            there = join_names([str(name) for name in rows[0]], 12)
            raise UserError(f"the rows have no column {join_names(missing)}, which the trees know (there: {there})")
        block: dict[str, Column] = {}
        for name in self.coding.columns:
            values = [row.get(name) for row in rows]
            block[name] = _words(values) if name in self.coding.categories else _numbers(name, values)
        return encode_rows(block, self.coding)

    def importance(self) -> dict[str, float]:
        """How much of the gain of all splits is a column's, from most to least."""
        if self.library == "xgboost":
            from paceline.workloads.trees.xgboost_rounds import describe_columns

            gains = self._booster.get_score(importance_type="total_gain")
            found = [float(gains.get(name, 0.0)) for name in describe_columns(self.coding)[0]]
        else:
            found = self._booster.feature_importance(importance_type="gain").tolist()
        whole = sum(found) or 1.0
        shares = dict(zip(self.coding.columns, (gain / whole for gain in found), strict=True))
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def export(self, folder: Path) -> None:
        """The library's own file, and the names behind its numbers."""
        write_atomic(folder / MODEL[self.library], self.raw)
        names = {
            "columns": list(self.coding.columns),
            "categories": self.coding.categories,
            "classes": list(self.classes),
        }
        write_atomic(folder / "names.json", json.dumps(names, indent=1, ensure_ascii=False) + "\n")

    def write_onnx(self, file: Path) -> None:
        from paceline.workloads.trees.onnx_export import write_trees_onnx

        write_trees_onnx(self, file)


@contextmanager
def _refusals(library: str) -> Iterator[None]:
    """What a library says of a model that it cannot use, in one line."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != library:
            raise
        raise UserError(f"{library} cannot use these trees: {describe_error(error)}") from None


def _check_names(coding: Coding, target: TreeTarget) -> None:
    """ValueError where they are not those of one model."""
    classes, task = len(target.classes), target.objective.task
    known = classes == 2 if task is Task.BINARY else classes >= 2 if task is Task.CLASSES else not classes
    if not known or not coding.columns or not set(coding.categories) <= set(coding.columns):
        raise ValueError("its names are not those of one model")


def _words(values: Sequence[Any]) -> Column:
    return encode_words(
        ["" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    )


def _numbers(name: str, values: Sequence[Any]) -> np.ndarray:
    from paceline.workloads.trees.table_source import MISSING

    found = np.empty(len(values), np.float64)
    for number, value in enumerate(values):
        try:
            found[number] = np.nan if value is None or str(value).strip() in MISSING else float(value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"row {number + 1}: {name!r} is {value!r:.40}, a number was expected") from None
    return found
