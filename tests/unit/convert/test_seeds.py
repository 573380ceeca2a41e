"""Configurations and commands as guides print them: each becomes a valid run file with these values."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

import paceline
from conftest import REPOSITORY, SHARED

SEEDS = {file.name[:3]: file for file in sorted((SHARED / "seeds").glob("0*.txt"))}
GUIDES = yaml.safe_load(Path(__file__).with_name("guides.yaml").read_text(encoding="utf-8"))
FILES, COMMANDS = GUIDES["files"], GUIDES["commands"]
pytestmark = pytest.mark.skipif(len(SEEDS) < 5, reason="the guides are not on this machine")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(seed):
    return SEEDS[seed].read_text(encoding="utf-8", errors="replace")


def blocks(seed):
    return [body for _, body in re.findall(r"^```(\w*)\n(.*?)^```", text_of(seed), re.DOTALL | re.MULTILINE)]


def block(seed, *marks):
    return next(body for body in blocks(seed) if all(mark in body for mark in marks))


def commands(seed, mark):
    """Lines of a guide that begin a command with these words, continued ones joined."""
    lines = "\n".join(blocks(seed)).replace("\\\n", " ").splitlines()
    found = [" ".join(line.split(" # ")[0].split()) for line in lines if mark in line]
    return list(dict.fromkeys(line for line in found if not line.startswith("#")))


def assert_holds(adopted, expected):
    """Compare values of the run file, by section, with those expected."""
    for section, value in expected.items():
        found = adopted.values[section]
        assert (found | value if isinstance(value, dict) else value) == found


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_guide(name, folder):
    seed, marks, file, expected = FILES[name]
    (folder / file).write_text(block(seed, *marks))
    adopted = paceline.adopt(file, out="run.yaml")
    assert_holds(adopted, expected)
    assert all(row.reason for row in adopted.rows if row.outcome.value == "not supported")
    assert paceline.load("run.yaml", ["workload=classifier"]).train


@pytest.mark.parametrize(("seed", "mark", "expected"), COMMANDS, ids=[f"{s} {m}" for s, m, _ in COMMANDS])
def test_a_command_of_a_guide(seed, mark, expected):
    assert commands(seed, mark)
    for line in commands(seed, mark):
        assert_holds(paceline.adopt(command=line, out="run.yaml", force=True), expected)


def test_a_command_and_the_file_that_it_names(folder):
    (line,) = re.findall(r"`(accelerate launch --config_file [^`]+)`", text_of("001"))
    (folder / "accelerate_config.yaml").write_text(block("001", "compute_environment"))
    adopted = paceline.adopt(command=line)
    assert_holds(adopted, {"parallel": {"ranks": 8}, "workload": "train.py", "train": {"precision": "bf16"}})
    (line,) = commands("004", "torchrun")
    (folder / "configs").mkdir()
    (folder / line.split("--config ")[1]).write_text(block("004", "experiment_name"))
    adopted = paceline.adopt(command=line)  # 32 on each of the four
    assert_holds(adopted, {"parallel": {"ranks": 4}, "workload": "classifier", "train": {"global_batch": 128}})
    assert next(row for row in adopted.rows if row.key == "script").outcome.value == "replaced"


def test_the_page_counts_what_became_of_the_keys(folder):
    counted = []
    for seed, marks, file, _ in FILES.values():
        (folder / file).write_text(block(seed, *marks))
        counted.append(paceline.adopt(file).counts())
        (folder / file).unlink()
    lines = [line for seed, mark, _ in COMMANDS for line in commands(seed, mark)]
    counted.append(sum((Counter(paceline.adopt(command=line).counts()) for line in lines), Counter()))
    kinds = ("kept", "translated", "derived", "noted", "not supported")
    rows = [[sum(counts.values()), *(counts.get(kind, 0) for kind in kinds)] for counts in counted]
    page = (REPOSITORY / "docs" / "adopt.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| [^|]+ ((?:\| \d+ ){6})\|$", page, re.MULTILINE)
    assert [[int(number) for number in re.findall(r"\d+", row)] for row in table] == rows
