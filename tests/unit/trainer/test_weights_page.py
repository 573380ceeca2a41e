"""The examples of docs/weights.md, as they stand there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "weights.md").read_text(encoding="utf-8")
SHORT = ["train.epochs=1", "data.points=512", "parallel.threads=1", "--quiet"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copytree(DOCS / "examples", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def first_loss(name):
    return read_steps(RunDir(Path("runs", name)).events_file(0))[0]["loss"]


def test_the_commands_do_what_the_page_says(here, ask):
    commands = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
    for command in commands:
        words = shlex.split(command)[1:]
        assert ask(*words, *(["--quiet"] if "--resume" in words else SHORT)).code == 0
    assert RunDir(here / "runs" / "base").spec().train.epochs == 1 + 2
    assert first_loss("base-next") == first_loss("again") != first_loss("base")


def test_the_lines_of_python_run(here):
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import paceline" in block)
    names = {}
    exec(code.replace("{", '{"parallel.threads": 1, ', 1), names)
    assert names["second"].summary.loss_first < names["first"].summary.loss_first
    assert RunDir(names["longer"].path).spec().train.steps == 40
