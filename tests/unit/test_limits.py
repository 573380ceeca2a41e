"""Limits of the shell that are too low for torch are one line, with the line to type."""

import resource
import subprocess
import sys

import pytest

from paceline.io import limits

CODE = """
import resource, sys
kind, value = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(kind, (value, value))
from paceline.cli.main import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("kind", "value", "line"),
    [("RLIMIT_AS", 800 << 20, "ulimit -v unlimited"), ("RLIMIT_NOFILE", 30, "ulimit -n 4096")],
)
@pytest.mark.parametrize("words", [("train", "parallel.ranks=2"), ("train",), ("plan",)])
def test_a_limit_that_is_too_low_is_one_line(kind, value, line, words, tmp_path):
    (tmp_path / "own.py").write_text("import torch\n")
    (tmp_path / "run.yaml").write_text("workload: own.py:Own\ntrain: {steps: 2}\n")
    verb, *rest = words
    command = [sys.executable, "-c", CODE, kind, str(value), verb, "run.yaml", *rest]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.endswith(f"type  {line}\n")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_more_open_files_are_allowed_where_they_may_be():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, before[1]))
    limits.check_limits(4)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 128
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
