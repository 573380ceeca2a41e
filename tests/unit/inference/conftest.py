"""Finished runs to use: a classifier of texts and a model of one's own."""

import csv
import random

import pytest

from paceline import load, train
from paceline.config import build_spec

WORDS = {
    "sport": ["goal", "team", "match", "player", "season", "win", "coach"],
    "money": ["bank", "market", "stock", "price", "trade", "profit", "share"],
    "sky": ["star", "planet", "moon", "orbit", "telescope", "comet", "light"],
}


def texts(n, seed):
    draw = random.Random(seed)
    for _ in range(n):
        label = draw.choice(list(WORDS))
        others = [word for words in WORDS.values() for word in words]
        yield " ".join(draw.choice(draw.choice([WORDS[label], others])) for _ in range(draw.randint(1, 40))), label


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    """(training file, held-out file): more than one chunk of an evaluation is held out."""
    folder = tmp_path_factory.mktemp("tables")
    for name, n in (("train.csv", 200), ("test.csv", 300)):
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *texts(n, seed=n)])
    return folder / "train.csv", folder / "test.csv"


@pytest.fixture(scope="session")
def classifier_run(tables, tmp_path_factory):
    """Its cache is gone, and so is the file that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    data = {"source": "csv", "path": str(tables[0]), "test_path": str(tables[1]), "cache": str(folder / "cache")}
    spec = build_spec(
        {
            "name": "news",
            "model": {"width": 32, "heads": 4, "layers": 2, "ffn": 64},
            "data": {**data, "max_length": 32, "vocab": 400},
            "train": {"steps": 10, "global_batch": 24, "lr": 3e-3},
            "parallel": {"threads": 1, "device": "cpu"},
        }
    )
    result = train(spec, folder, show=False)
    (folder / "cache").rename(folder / "gone")
    tables[0].rename(tables[0].with_name("gone.csv"))
    return result


@pytest.fixture(scope="session")
def lm_run(tiny_lm, tmp_path_factory):
    """With tied weights and a gate; its cache is gone."""
    folder = tmp_path_factory.mktemp("lm")
    changes = {"train.steps": 2, "train.evaluate_on": 1, "model.tied": True, "data.cache": str(folder / "cache")}
    result = train(tiny_lm.replace(changes), folder, show=False)
    (folder / "cache").rename(folder / "gone")
    return result


@pytest.fixture(scope="session")
def circle_run(tmp_path_factory, circle_file):
    return train(
        load(circle_file.with_suffix(".yaml"), ["parallel.threads=1"]), tmp_path_factory.mktemp("own"), show=False
    )


@pytest.fixture(scope="session")
def circle_file(tmp_path_factory):
    """A copy of the example, which a test may change."""
    from conftest import REPOSITORY

    folder = tmp_path_factory.mktemp("circle")
    for name in ("circle.py", "circle.yaml", "points.csv"):
        (folder / name).write_bytes((REPOSITORY / "docs" / "examples" / name).read_bytes())
    return folder / "circle.py"
