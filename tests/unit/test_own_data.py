"""The page on data: what data(split) may return, and usual scripts before and after."""

import csv
import gzip
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline.config import RunSpec
from paceline.data.samples import samples_of
from script_runs import write_digits

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGE = (DOCS / "own_data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SCRIPTS = ("mnist", "census", "reviews")


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Small files under the names that the scripts and the page read."""
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "data" / "mnist", train=320, test=64)
    _census(folder / "data" / "adult_census")
    _reviews(folder / "data" / "amazon_reviews_2023")
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (folder / "photos" / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 30)).save(folder / "photos" / split / name / "1.png")
        (folder / "people").mkdir(exist_ok=True)
        text = "age,hours,job,city,income\n30,40,cook,Rome,low\n50,20,clerk,Oslo,high\n"
        (folder / "people" / f"{split}.csv").write_text(text)
    return folder


def _write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") as opened:
        csv.writer(opened).writerows(rows)


def _census(folder):
    words = ("workclass", "marital_status", "occupation", "relationship", "sex")
    numbers = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
    draw = np.random.default_rng(0)
    for split, count in (("train", 900), ("test", 100)):
        rows = [[*numbers, *words, "income"]]
        for _ in range(count):
            values, kinds = draw.integers(0, 60, len(numbers)), draw.integers(0, 3, len(words))
            rows.append([*values, *(f"kind {k}" for k in kinds), ">50K" if kinds[0] else "<=50K"])
        _write(folder / f"adult_{split}.csv.gz", rows)


def _reviews(folder):
    draw, words, rows = np.random.default_rng(0), ["the", "box", "hair", "it", "was"], [("text", "rating")]
    for good in draw.integers(2, size=300):
        other = " ".join(draw.choice(words, draw.integers(1, 9)))
        rows.append((f"{other} {'lovely' if good else 'broken'}", 5.0 if good else 1.0))
    _write(folder / "reviews_sample.csv.gz", rows)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "\ndef data(" in block])
def test_what_data_returns_on_the_page_makes_batches(block, data_folder, monkeypatch):
    monkeypatch.chdir(data_folder)
    if "import datasets" in block:
        pytest.importorskip("datasets")
    found: dict = {}
    exec(block, found)
    methods = {name: found[name] for name in ("data", "collate") if name in found}
    workload = type("Own", (paceline.Workload,), methods)(RunSpec())
    for split in ("train", "test"):
        samples = samples_of(workload, split)
        batch = samples.batch(np.arange(2), np.zeros(2, np.int64))
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        assert [len(part) for part in parts] == [2] * len(parts)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_before_and_after(name, data_folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(data_folder)
    runpy.run_path(str(EXAMPLES / f"before_{name}.py"), run_name="__main__")
    before = float(re.findall(r"accuracy (\S+)", capsys.readouterr().out)[-1])
    spec = paceline.load(EXAMPLES / f"after_{name}.yaml", ["parallel.threads=1"])
    after = paceline.train(spec, tmp_path, show=False).metrics["accuracy"]
    assert min(before, after) > {"mnist": 0.2, "census": 0.9, "reviews": 0.9}[name]
