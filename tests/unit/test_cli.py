"""The command line: quick to answer, and readable in 100 columns."""

import os
import re
import signal
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli.main import VERBS as OWN
from paceline.cli.main import list_verbs
from paceline.config import load

VERBS = ("train", "explain", "check", "export")
EXPLAIN = [sys.executable, "-m", "paceline", "explain"]
QUICK_S = 0.3


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: news\nmodel: {width: 64}\ntrain: {lr: 3e-4}\n")
    return file


def test_help_lists_every_verb(ask):
    lines = ask("--help").out.splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in list_verbs()]
    assert sorted(named) == sorted(list_verbs())
    groups = list(dict.fromkeys(verb.group for verb in OWN.values()))
    assert [line[:-1] for line in lines if line[:-1] in groups] == groups
    assert len(lines) - lines.index("examples:") == 6
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(("typed", "meant"), [("tran", "'train'"), ("reprot", "'report'"), ("a.yaml", "train a.yaml")])
def test_unknown_verb_suggests_a_known_one(ask, typed, meant):
    answer = ask(typed, "x")
    assert answer.code == 2
    assert meant in answer.err


def test_missing_path_suggests_a_similar_one(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name in ("lm_tiny.yaml", "classifier_news.yaml", "clasifier.csv"):
        (tmp_path / "recipes" / name).touch()
    typed = ("recipes/lm.yaml", "recipe/lm_tiny.yaml", "recipes/clasifier.yaml", "recipes/abc.yaml")
    found = [re.search(r"did you mean '(.*)'", ask("train", path).err) for path in typed]
    tiny, news = "recipes/lm_tiny.yaml", "recipes/classifier_news.yaml"
    assert [match and match[1] for match in found] == [tiny, tiny, news, None]


@pytest.mark.parametrize(
    ("words", "out"), [*((f"{v} --help", f"usage: paceline {v}") for v in VERBS), ("--version", __version__)]
)
def test_help_and_version(ask, words, out):
    answer = ask(words)
    assert answer.code == 0
    assert out in answer.out


def test_explain_shows_unit_and_origin(ask, run_file):
    out = ask("explain", run_file, "parallel.ranks=4", "--all").out
    assert max(map(len, out.splitlines())) <= 100
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for key, _, unit, _ in load(run_file).fields():
        assert unit in rows[key]
    assert rows["train.lr"].split() == ["train.lr", "0.0003", "per", "step", "run.yaml", "line", "3"]
    assert rows["parallel.ranks"].split() == ["parallel.ranks", "4", "processes", "command", "line"]
    assert rows["train.seed"].split() == ["train.seed", "0", "default"]
    assert "128 global = 32 per pass × 4 ranks × 1 accumulated" in out


def test_explain_counts_defaults(ask, run_file):
    out = ask("explain", run_file, "parallel.ranks=4").out.splitlines()
    given = [line.split()[0] for line in out[1 : out.index("")]]
    assert given == ["name", "workload", "model.width", "train.lr", "parallel.ranks"]
    assert out[-1].startswith(f"{len(list(load(run_file).fields())) - 5} more keys")


def test_explain_shows_values_as_they_are(ask, run_file):
    assert "'data.text" not in ask("explain", run_file, "data.text=[bold]x").out
    assert "a [b] c" in ask("explain", run_file, "data.text=a [b] c").out, "brackets are not markup"


def test_ascii_terminal_gets_question_marks(run_file):
    command, ascii_only = [*EXPLAIN, str(run_file)], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=ascii_only)
    assert done.returncode == 0
    assert b"128 global = 128 per pass ? 1 rank ? 1 accumulated" in done.stdout


def test_control_characters_are_escaped(run_file, ask):
    run_file.write_text('name: news\ntrain: {"l\\er\\x9b2J": 3}\n')
    assert r"train.l\x1br\x9b2J: unknown key" in ask("explain", run_file).err


def test_a_reader_that_leaves_early_is_no_error(run_file):
    process = subprocess.Popen([*EXPLAIN, str(run_file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()


@pytest.mark.parametrize("words", [["-m", "paceline", "--help"], ["-c", "import paceline"]], ids=["help", "import"])
def test_little_work(words):
    """In seconds of the processor, the best of a few tries."""
    took = []
    for _ in range(5):
        began = os.times()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        ended = os.times()
        took.append(ended.children_user - began.children_user + ended.children_system - began.children_system)
    assert min(took) < QUICK_S


@pytest.mark.parametrize("words", [["--help"], ["explain"]])
def test_nothing_heavy_is_imported(run_file, words):
    words = [*words, *([run_file] if words[0][0] != "-" else [])]
    command = [sys.executable, "-X", "importtime", "-m", "paceline", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "paceline.cli.main" in imported
    assert not imported & {"torch", "numpy", "scipy", "tokenizers", "safetensors"}


def test_ctrl_c_during_imports_is_silent(tmp_path):
    """As it is while modules are imported, which takes longer than anything else that a small command does."""
    slow = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "rich.py").write_text(slow)
    (tmp_path / "pydantic.py").write_text(slow)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([*EXPLAIN, "run.yaml"], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
