"""Ensembles against their members on held-out rows: census (trees and a net) and reviews (trees and words).

    python benchmarks/ensembles.py [census|reviews ...] [--out FOLDER] [--folds 5]
    python benchmarks/ensembles.py choose [--out FOLDER]

Prints a row for each model, with the standard error of the bootstrap, and by how much the ensemble is better on the
same drawn rows. The members are trained by folds; nothing is fitted on the rows that are shown. `choose` is how the
settings of the census's members were found: on a fifth of the rows to learn from.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shutil
import tempfile
from pathlib import Path

import yaml

import paceline

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"
WORDS = ("workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country")
METRICS = ("loss", "accuracy", "macro_f1", "auc")


TREES = {
    "workload": "trees",
    "model": {"max_depth": 6, "learning_rate": 0.1},
    "data": {"categories": list(WORDS)},
    "train": {"steps": 150},
}
NET = {
    "workload": f"{REPOSITORY}/docs/examples/table_net.py:TableNet",
    "model": {"dropout": 0.2},
    "data": {"ignore": ["fnlwgt"]},
    "train": {"epochs": 12, "global_batch": 256, "lr": 2e-3, "weight_decay": 0.05},
}
TRIED = {
    "trees": (TREES, {"model.max_depth": [4, 6], "train.steps": [150, 300]}),
    "net": (NET, {"model.dropout": [0.0, 0.2], "train.epochs": [6, 12]}),
}


def census(folder: Path) -> dict[str, object]:
    """Trees, and a net with two hidden layers."""
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_bytes(_people(split))
    _write(folder / "trees.yaml", TREES)
    _write(folder / "net.yaml", NET)
    data = {"path": str(folder / "train.csv"), "test_path": str(folder / "test.csv"), "label": "income"}
    return {"members": ["trees.yaml", "net.yaml"], "data": data}


def choose(folder: Path) -> None:
    head, *rows = _people("train").splitlines(keepends=True)
    (folder / "learn.csv").write_bytes(head + b"".join(row for number, row in enumerate(rows) if number % 5))
    (folder / "choose.csv").write_bytes(head + b"".join(rows[::5]))
    data = {"path": str(folder / "learn.csv"), "test_path": str(folder / "choose.csv"), "label": "income"}
    for name, (member, tried) in TRIED.items():
        values = {**member, "name": name, "data": {**member["data"], **data}}  # type: ignore[dict-item]
        for row in paceline.sweep(values, tried, out=folder / name, score="-loss").rows:
            told = ", ".join(f"{key}={value}" for key, value in row.values.items())
            print(f"{name}: {told}: log loss {row.metrics['loss']:.4f}, AUC {row.metrics['auc']:.4f}", flush=True)


def _people(split: str) -> bytes:
    with gzip.open(SHARED / "adult_census" / f"adult_{split}.csv.gz") as read:
        return read.read()


def reviews(folder: Path) -> dict[str, object]:
    """Who wrote when about what, for trees; what they wrote, for words with weights. The label has five classes."""
    with gzip.open(SHARED / "amazon_reviews_2023" / "reviews_sample.csv.gz", "rt", newline="") as read:
        rows = list(csv.DictReader(read))
    with (folder / "reviews.csv").open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["user", "category", "timestamp", "letters", "shouts", "capitals", "text", "rating"])
        for row in rows:
            text = f"{row['title']}. {row['text']}"
            capitals = sum(sign.isupper() for sign in text) / len(text)
            told = [row["user_id"], row["category"], row["timestamp"], len(text), text.count("!"), f"{capitals:.4f}"]
            table.writerow([*told, text, row["rating"]])
    _write(
        folder / "trees.yaml",
        {
            "workload": "trees",
            "model": {"objective": "multiclass", "max_depth": 4, "learning_rate": 0.05, "subsample": 0.7},
            "data": {"categories": ["user", "category"]},
            "train": {"steps": 80},
            "parallel": {"threads": 1},
        },
    )
    _write(
        folder / "words.yaml",
        {
            "workload": f"{REPOSITORY}/benchmarks/words_net.py:Words",
            "data": {"names": ["1.0", "2.0", "3.0", "4.0", "5.0"]},
            "train": {"epochs": 8, "global_batch": 64, "lr": 1e-2, "weight_decay": 0.0, "schedule": "constant"},
            "parallel": {"threads": 1},
        },
    )
    data = {"path": str(folder / "reviews.csv"), "label": "rating", "test_fraction": 0.3}
    return {"members": ["trees.yaml", "words.yaml"], "data": data}


def _write(file: Path, values: dict[str, object]) -> None:
    file.write_text(yaml.safe_dump(values))


def measured(name: str, folder: Path, folds: int) -> None:
    asked = {"census": census, "reviews": reviews}[name](folder)
    members = [str(folder / file) for file in asked["members"]]  # type: ignore[attr-defined]
    values = {"name": name, "workload": "ensemble", "model": {"members": members}}
    run = paceline.train({**values, "data": {**asked["data"], "folds": folds}}, folder / "runs")  # type: ignore[dict-item]
    told = json.loads((run.path / "ensemble.json").read_text())["held_out"]
    print(f"\n## {name}, {told['rows']:,} held-out rows\n\n| | {' | '.join(METRICS)} |\n|---{'|---' * len(METRICS)}|")
    for model, scores in told["each"].items():
        cells = " | ".join(f"{scores[m]['value']:.4f} ± {scores[m]['error']:.4f}" for m in METRICS)
        print(f"| {model} | {cells} |")
    for model, gains in told["gains"].items():
        cells = " | ".join(f"{gains[m]['value']:+.4f} ± {gains[m]['error']:.4f}" for m in METRICS)
        print(f"| better than {model} by | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=("census", "reviews", "choose"), default=["census", "reviews"])
    parser.add_argument("--out", type=Path, help="where to keep the runs")
    parser.add_argument("--folds", type=int, default=5)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp())
    for name in arguments.names:
        (folder / name).mkdir(parents=True)
        if name == "choose":
            choose(folder / name)
        else:
            measured(name, folder / name, arguments.folds)
    if arguments.out is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
