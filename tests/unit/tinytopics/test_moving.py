"""The page on moving from tinytopics: its program runs before and after."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import pytest

from paceline.launch.command import run_with_stand_in
from paceline.tinytopics.__main__ import STAND_IN, USAGE

DOCS = Path(__file__).resolve().parents[3] / "docs"
BEFORE, AFTER = (DOCS / "examples" / "moving" / f"tinytopics_{word}.py" for word in ("before", "after"))
PICTURES = {"loss.png", "structure.png"}


@pytest.fixture
def imports(monkeypatch):
    """Forget afterwards what was imported under the name tinytopics."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tinytopics"]:
        del sys.modules[name]


def test_the_program_prints_the_same_with_one_import_changed(imports, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_with_stand_in([str(BEFORE)], STAND_IN, USAGE)
    before = capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == PICTURES
    runpy.run_path(str(AFTER), run_name="__main__")
    after = capsys.readouterr().out
    assert before == after
    assert float(re.search(r"([\d.]+) % of the topics' mass", after)[1]) < 5
    changed = set(AFTER.read_text(encoding="utf-8").splitlines()) ^ set(BEFORE.read_text(encoding="utf-8").splitlines())
    page = (DOCS / "moving" / "tinytopics.md").read_text(encoding="utf-8")
    assert len(changed) == 2
    assert all(line in page for line in changed)


def test_a_module_and_the_processes_that_it_starts(tmp_path):
    """Whether they are started by multiprocessing, which hands on sys.path, or as commands."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "__init__.py").write_text("")
    (tmp_path / "work" / "main.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "import tinytopics as tt\n"
        "from tinytopics.colors import pal_tinytopics\n"
        "def home(_): import tinytopics.loss as loss; return loss.__name__\n"
        "if __name__ == '__main__':\n"
        "    print(tt.__name__, sys.argv[1:], len(pal_tinytopics()))\n"
        "    print(multiprocessing.get_context('spawn').Pool(1).map(home, [0]), flush=True)\n"
        "    subprocess.run([sys.executable, '-c', 'import tinytopics; print(tinytopics.__name__)'], check=True)\n"
    )
    command = [sys.executable, "-m", "paceline.tinytopics", "-m", "work.main", "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    expected = ["paceline.tinytopics ['--lr', '1'] 10", "['paceline.tinytopics.models']", "paceline.tinytopics"]
    assert done.stdout.splitlines() == expected, done.stderr
