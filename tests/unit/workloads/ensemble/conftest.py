"""Tables whose label depends on a number and a text, and an ensemble trained on one of them."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

WORDS = ("awful boring poor", "lovely bright good")


def write_rows(file: Path, count: int, seed: int) -> Path:
    """The label is mostly what number and text say together."""
    random = np.random.default_rng(seed)
    with file.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["size", "noise", "words", "verdict"])
        for _ in range(count):
            size, tone = random.normal(), int(random.integers(2))
            likes = random.random() < 1 / (1 + np.exp(-1.5 * size - 3 * (tone - 0.5)))
            said = " ".join(random.permutation(WORDS[tone].split()))
            table.writerow([f"{size:.4f}", f"{random.normal():.4f}", said, "yes" if likes else "no"])
    return file


def write_yaml(file: Path, **values: object) -> Path:
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="session")
def member_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    trees = write_yaml(
        folder / "trees.yaml",
        workload="trees",
        model={"max_depth": 3, "learning_rate": 0.3},
        data={"cache": str(folder / "cache")},
        train={"steps": 12, "log_every": 12},
        parallel={"threads": 1},
    )
    texts = write_yaml(
        folder / "texts.yaml",
        model={"width": 16, "heads": 2, "layers": 1, "ffn": 16},
        data={"source": "csv", "text": "words", "max_length": 8, "vocab": 300, "cache": str(folder / "cache")},
        train={"epochs": 3, "global_batch": 32, "lr": 3e-3},
        parallel={"threads": 1},
    )
    return trees, texts


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return write_rows(folder / "people.csv", 600, 0), write_rows(folder / "others.csv", 400, 1)


@pytest.fixture(scope="session")
def request_values(member_files, tables):
    """Of an ensemble whose members are trained by folds."""
    learn, test = tables
    return {
        "name": "both",
        "workload": "ensemble",
        "model": {"members": [str(file) for file in member_files]},
        "data": {"path": str(learn), "test_path": str(test), "label": "verdict", "folds": 2},
    }


@pytest.fixture(scope="session")
def ensemble_run(request_values, tmp_path_factory):
    import paceline

    return paceline.train(request_values, tmp_path_factory.mktemp("runs"), show=False)


@pytest.fixture(scope="session")
def make_table():
    return write_rows
