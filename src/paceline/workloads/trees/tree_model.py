"""Fitted trees: the files of a run folder, predictions for new rows, importance, and export."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.prepared_table import Coding, TableTarget, describe_predicted, encode_rows, parse_predicted
from paceline.errors import UserError
from paceline.io.files import read_bytes, read_sealed, write_atomic, write_sealed
from paceline.workloads.trees.scoring import predict_from_margins

MODEL_FILES = {"xgboost": "model.json", "lightgbm": "model.txt"}
TABLE_FILE = "table.json"
MAX_MODEL_BYTES = 1 << 34


def load_booster(library: str, raw: bytes) -> Any:
    if library == "xgboost":
        import xgboost

        return xgboost.Booster(model_file=bytearray(raw))
    import lightgbm

    return lightgbm.Booster(model_str=raw.decode())


@dataclass(frozen=True, repr=False)
class FittedTrees:
    library: str
    raw: bytes
    coding: Coding
    target: TableTarget

    def write(self, folder: Path) -> None:
        write_atomic(folder / MODEL_FILES[self.library], self.raw)
        about = {"library": self.library, **describe_predicted(self.target, self.coding)}
        write_sealed(folder / TABLE_FILE, {**about, "sha256": hashlib.sha256(self.raw).hexdigest()})

    @classmethod
    def cut(cls, library: str, raw: bytes, rounds: int, coding: Coding, target: TableTarget) -> "FittedTrees":
        """Return the model of the first `rounds` rounds alone."""
        booster = load_booster(library, raw)
        if library == "xgboost":
            return cls(library, bytes(booster[:rounds].save_raw("json")), coding, target)
        return cls(library, booster.model_to_string(num_iteration=rounds).encode(), coding, target)

    @classmethod
    def read(cls, folder: Path) -> "FittedTrees":
        """Read the trees of a run folder. A model whose SHA-256 differs never reaches the library."""
        file, command = folder / TABLE_FILE, f"paceline train --resume {folder}"
        if not file.exists():
            raise UserError(f"{folder} has no trees yet; continue with  {command}", code="not-found")
        about = read_sealed(file)
        try:
            target, coding = parse_predicted(about)
            file = folder / MODEL_FILES[about["library"]]
            raw = read_bytes(file, MAX_MODEL_BYTES)
            if about.get("sha256", "") not in ("", hashlib.sha256(raw).hexdigest()):  # older runs have none
                raise ValueError("its checksum differs")
            return cls(about["library"], raw, coding, target)
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise UserError(f"{file} is damaged ({error}); write it again with  {command}", code="damaged") from None

    @property
    def classes(self) -> Sequence[str]:
        return self.target.classes

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Predict rows, each a mapping from column names to values."""
        found = self.predict_encoded(encode_rows(rows, self.coding))
        return {"probabilities": found} if self.target.classes else {"predicted": found}

    def predict_encoded(self, X: np.ndarray) -> np.ndarray:
        return predict_from_margins(self.margins(X), self.target)

    def margins(self, X: np.ndarray) -> np.ndarray:
        return self._call_library(X, "output_margin", "raw_score").reshape(len(X), self.target.outputs)

    def contributions(self, X: np.ndarray) -> np.ndarray:
        """Return SHAP values, what each column adds to the margins: (rows, outputs, columns)."""
        found = self._call_library(X, "pred_contribs", "pred_contrib")
        return found.reshape(len(X), self.target.outputs, -1)[:, :, :-1]  # the last one is the bias

    def _call_library(self, X: Any, of_xgboost: str, of_lightgbm: str) -> np.ndarray:
        """Predict with the option that a library has by this name."""
        if self.library == "xgboost":
            from paceline.workloads.trees.xgboost_rounds import build_dmatrix

            X = build_dmatrix(X, self.coding, 0)
        option = of_xgboost if self.library == "xgboost" else of_lightgbm
        return np.asarray(self._booster.predict(X, **{option: True}))

    @cached_property
    def _booster(self) -> Any:
        return load_booster(self.library, self.raw)

    @property
    def rounds(self) -> int:
        booster = self._booster
        return int(booster.num_boosted_rounds() if self.library == "xgboost" else booster.current_iteration())

    def importance(self) -> dict[str, float]:
        """Return each column's share of the gain of all splits, largest first."""
        if self.library == "xgboost":
            from paceline.workloads.trees.xgboost_rounds import describe_columns

            gains = self._booster.get_score(importance_type="total_gain")
            found = [float(gains.get(name, 0.0)) for name in describe_columns(self.coding)[0]]
        else:
            found = self._booster.feature_importance(importance_type="gain").tolist()
        total = sum(found) or 1.0
        shares = {name: gain / total for name, gain in zip(self.coding.columns, found, strict=True)}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def export(self, folder: Path) -> None:
        write_atomic(folder / MODEL_FILES[self.library], self.raw)
        names = {"columns": self.coding.columns, "categories": self.coding.categories, "classes": self.classes}
        write_atomic(folder / "names.json", json.dumps(names, indent=1, ensure_ascii=False) + "\n")

    def write_onnx(self, file: Path) -> None:
        from paceline.workloads.trees.onnx_export import write_trees_onnx

        write_trees_onnx(self, file)
