"""Every rank frozen in every phase, one stuck in the user's data code, ranks in different collectives, a link that
is cut without a word: the run ends within its timeout + 10 s, and the message names the rank and its place.

    pytest tests/cluster/test_silent_ranks.py
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import freezing
import pytest
import yaml
from ending import wait_until
from nodes import nodes, why_not

from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

TIMEOUT_S = 15.0
MORE_S = 10.0
PLACES = {
    "start": "before its first step",
    "data": "",  # in its data worker, while that is measured or later
    "step": "in step 1",
    "evaluation": "in the evaluation after step 3",
    "checkpoint": "in the checkpoint of step 3",
    "writing": "",  # while training goes on, wherever it is then
    "end": "at the end, after step 6",
}


def run_file(folder, cache, **changes):
    values = {
        "name": "frozen",
        "workload": f"{Path(freezing.__file__)}:Freezing",
        "model": {"width": 32, "heads": 4, "layers": 1, "ffn": 64},
        "data": {"source": "docstrings", "max_length": 64, "vocab": 1024, "limit": 203, "cache": str(cache)},
        "train": {"steps": 6, "global_batch": 24, "checkpoint_every": 3, "evaluate_every": 3, **changes},
        "parallel": {"threads": 1, "ranks": 2, "timeout_s": TIMEOUT_S},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return [sys.executable, "-m", "paceline", "train", str(file), "--quiet", "--out", str(folder / "runs")]


def ended(command, folder, freeze):
    """(seconds from the moment at which it froze to the end, what was said)."""
    marker = folder / "frozen"
    environ = {**os.environ, freezing.FREEZE: freeze, freezing.MARKER: str(marker)}
    out = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert out.returncode == 1, out.stdout + out.stderr
    assert "Traceback" not in out.stderr
    seconds = time.time() - marker.stat().st_mtime
    print(f"{seconds:.1f} s")
    return seconds, out.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PLACES)
def test_a_frozen_rank_is_named(phase, rank, corpus_cache, tmp_path):
    seconds, said = ended(run_file(tmp_path, corpus_cache), tmp_path, f"{phase} {rank}")
    assert said.startswith(f"paceline: rank {rank} on ")
    assert "a signal such as SIGSTOP has stopped it" in said
    assert PLACES[phase] in said
    assert "in reached" in said or phase in ("data", "writing")
    assert seconds < TIMEOUT_S + MORE_S


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_stuck_in_the_users_data_code_is_named_with_its_line(workers, rank, corpus_cache, tmp_path):
    command = [*run_file(tmp_path, corpus_cache), f"data.workers={workers}"]
    seconds, said = ended(command, tmp_path, f"stuck {rank}")
    assert said.startswith(f"paceline: rank {rank} on ")
    assert "in wait_for_a_lock_that_nobody_gives_back" in said
    assert seconds < TIMEOUT_S + MORE_S


def test_ranks_in_different_collectives_are_both_named(corpus_cache, tmp_path):
    seconds, said = ended(run_file(tmp_path, corpus_cache), tmp_path, "elsewhere 1")
    assert "rank 1" in said
    assert "loss (freezing.py" in said
    assert "rank 0" in said
    assert seconds < TIMEOUT_S + MORE_S


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_link_that_is_cut_without_a_word(corpus_cache, tmp_path):
    command = run_file(tmp_path, corpus_cache, steps=100_000)
    with nodes(2, tmp_path) as found:
        ranks = found.start_ranks(command)
        events = RunDir(tmp_path / "runs" / "frozen").events_file(0)
        assert wait_until(lambda: events.exists() and len(read_steps(events)) > 5, ranks[0])
        found.cut(1)
        began = time.monotonic()
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
        seconds = time.monotonic() - began
    print(f"{seconds:.1f} s")
    assert all(rank.returncode == 1 for rank in ranks), said
    assert any("look at the network between node" in text for text in said), said
    assert seconds < TIMEOUT_S + MORE_S
