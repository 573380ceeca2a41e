"""The tables of benchmarks/trees.py: adult_census and nycflights13 from the folder shared/data, or a made-up one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
KNOWN_LATER = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "year", "time_hour"]
"""What nobody knows of a flight before it leaves, and what is the same or said twice."""


def as_run_data(name: str, folder: Path) -> dict[str, Any]:
    """The section `data` of a run file, and the files that it names. Words are categories; adult has its test rows."""
    if name == "made-up":
        return {"rows": 60_000}
    table = _adult("train") if name == "adult" else _flights()
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    words = [field.name for field in table.schema if pyarrow.types.is_string(field.type) and field.name != "label"]
    data: dict[str, Any] = {"path": str(folder / f"{name}.parquet"), "categories": words}
    if name == "adult":
        pyarrow.parquet.write_table(_adult("test"), folder / "adult_test.parquet")
        data["test_path"] = str(folder / "adult_test.parquet")
    return data


def as_arrays(name: str, repeat: int, folder: Path) -> Path:
    """All rows as an .npz file of numbers, words by their place in the alphabet, each that many times."""
    if name == "made-up":
        random = np.random.default_rng(0)
        X = random.random((200_000, 12), dtype=np.float32)
        y = (random.random(len(X)) < X[:, 0] * X[:, 1] + 0.3 * (X[:, 2] > 0.5)).astype(np.float32)
    else:
        table = _adult("train") if name == "adult" else _flights()
        X = np.stack([_numbers(table.column(c)) for c in table.column_names if c != "label"], 1)
        y = _numbers(table.column("label"))
    np.savez(folder / f"{name}.npz", X=np.repeat(X, repeat, axis=0), y=np.repeat(y, repeat))
    return folder / f"{name}.npz"


def _numbers(column: pyarrow.ChunkedArray) -> np.ndarray:
    if not pyarrow.types.is_string(column.type):
        return column.cast(pyarrow.float64()).to_numpy().astype(np.float32)
    _, codes = np.unique(np.array(column.fill_null("").to_pylist()), return_inverse=True)
    return np.where(column.is_null().to_numpy(), np.nan, codes).astype(np.float32)


def _adult(split: str) -> pyarrow.Table:
    table = _csv(SHARED / "adult_census" / f"adult_{split}.csv.gz")
    label = pc.if_else(pc.starts_with(table.column("income"), ">50K"), ">50K", "<=50K")
    return table.drop_columns(["income"]).append_column("label", label)


def _flights() -> pyarrow.Table:
    """Late by more than a quarter of an hour? From what is known before the flight."""
    table = _csv(SHARED / "nycflights13" / "flights.csv.gz")
    table = table.filter(table.column("arr_delay").is_valid())
    late = pc.if_else(pc.greater(table.column("arr_delay"), 15), "late", "in time")
    return table.drop_columns(KNOWN_LATER).append_column("label", late)


def _csv(file: Path) -> pyarrow.Table:
    convert = pyarrow.csv.ConvertOptions(null_values=["NA", "?", ""], strings_can_be_null=True)
    return pyarrow.csv.read_csv(file, convert_options=convert)
