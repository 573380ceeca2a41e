"""Boosted trees against the library called directly, and two ranks against one.

    python benchmarks/trees.py [--rounds 100] [--table adult|flights|made-up] [--repeat 3] [--turns 3]

Each turn runs all of them one after the other, in processes of their own; ratios are taken within a turn, so that a
machine that is slower for a while is slower for both sides. `--repeat` writes the rows that many times (flights: 3
makes 785,421 rows).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
DIRECT = """
import json, sys, time
import numpy as np, xgboost
began = time.perf_counter()
z = np.load(sys.argv[1])
matrix = xgboost.QuantileDMatrix(z["X"], z["y"], nthread=1)
parameters = dict(objective="binary:logistic", max_depth=8, learning_rate=0.1, nthread=1)
booster = xgboost.Booster(parameters, cache=[matrix])
middle = time.perf_counter()
for number in range(int(sys.argv[2])):
    booster.update(matrix, number)
print(json.dumps({"rounds_s": time.perf_counter() - middle, "whole_s": time.perf_counter() - began}))
"""


def table(name: str, repeat: int, folder: Path) -> Path:
    file = folder / f"{name}.npz"
    if name == "made-up":
        random = np.random.default_rng(0)
        X = random.random((200_000, 12), dtype=np.float32)
        y = (random.random(len(X)) < X[:, 0] * X[:, 1] + 0.3 * (X[:, 2] > 0.5)).astype(np.float32)
    else:
        X, y = {"adult": _adult, "flights": _flights}[name]()
    np.savez(file, X=np.repeat(X, repeat, axis=0), y=np.repeat(y, repeat))
    return file


def _adult() -> tuple[np.ndarray, np.ndarray]:
    return _numbers(SHARED / "adult_census" / "adult_train.csv.gz", "income", lambda label: label.startswith(">50K"))


def _flights() -> tuple[np.ndarray, np.ndarray]:
    file, late = SHARED / "nycflights13" / "flights.csv.gz", ["dep_time", "dep_delay", "arr_time", "air_time", "year"]
    return _numbers(file, "arr_delay", lambda label: float(label) > 15, ignore=late)


def _numbers(file: Path, label: str, positive, ignore=()) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """Words by their place in the alphabet."""
    import pyarrow.csv

    convert = pyarrow.csv.ConvertOptions(null_values=["NA", "?", ""], strings_can_be_null=True)
    found = pyarrow.csv.read_csv(file, convert_options=convert)
    found = found.filter(found.column(label).is_valid())
    columns = []
    for name in found.column_names:
        if name in (label, *ignore):
            continue
        values = found.column(name).to_pandas()
        words = not __import__("pandas").api.types.is_numeric_dtype(values)
        columns.append((values.astype("category").cat.codes if words else values).to_numpy(np.float32))
    return np.stack(columns, 1), np.array([positive(str(v)) for v in found.column(label).to_pylist()], np.float32)


def ours(file: Path, rounds: int, ranks: int, folder: Path) -> dict[str, float]:
    spec = folder / "run.yaml"
    data = {"path": str(file), "test_fraction": 0, "cache": str(folder / "cache"), "bin_rows": 1 << 30}
    run = {"name": "trees", "workload": "trees", "model": {"max_depth": 8, "learning_rate": 0.1}, "data": data}
    run |= {"train": {"steps": rounds}, "parallel": {"ranks": ranks, "threads": 1, "device": "cpu"}}
    spec.write_text(json.dumps(run))
    out = Path(tempfile.mkdtemp(dir=folder))
    began = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "train", str(spec), "--out", str(out), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - began
    found = json.loads((out / "trees" / "summary.json").read_text())
    return {"rounds_s": found["in_steps_s"], "run_s": found["seconds"], "whole_s": whole}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--table", default="made-up", choices=("adult", "flights", "made-up"))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = table(asked.table, asked.repeat, folder)
        overhead, speedup = [], []
        for _ in range(asked.turns):
            command = [sys.executable, "-c", DIRECT, str(file), str(asked.rounds)]
            direct = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            one, two = (ours(file, asked.rounds, ranks, folder) for ranks in (1, 2))
            overhead.append(one["rounds_s"] / direct["rounds_s"] - 1)
            speedup.append(one["rounds_s"] / two["rounds_s"])
            print(json.dumps({"direct": direct, "one rank": one, "two ranks": two}), flush=True)
        print(f"overhead of rounds, one rank of one thread: {statistics.median(overhead):+.1%}")
        print(f"two ranks of one thread: {statistics.median(speedup):.2f} times one")


if __name__ == "__main__":
    main()
