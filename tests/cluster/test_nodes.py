"""Several machines (network namespaces with names of their own): the answer is that of one rank under every layout, and
what is wrong with a node is said. Needs root.

    pytest tests/cluster/test_nodes.py
"""

import os
import sys
import time
from pathlib import Path

import pytest
from nodes import nodes, why_not
from runs import LAYOUTS, says_the_same

from disagreeing import ROWS, TABLE, TEXTS, TOPICS, TRAIN, TREES, write_files
from paceline import RunResult
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
PACELINE = [sys.executable, "-m", "paceline"]


def outcome(ranks, seconds=600):
    said = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def on_two_nodes(folder, *words, **options):
    """(exit codes, what was said) of the ranks of a command of Paceline's."""
    with nodes(2, folder) as found:
        return outcome(found.start_ranks([*PACELINE, *words], **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_have_the_answer_of_one_rank(layout, lm_file, alone, tmp_path):
    words = [f"parallel.{key}={value}" for key, value in LAYOUTS[layout].items()]
    codes, said = on_two_nodes(tmp_path, "train", str(lm_file), "--out", str(tmp_path / "runs"), *words, each=2)
    assert codes == [0] * 4, said
    run = RunDir(tmp_path / "runs" / "nodes")
    hosts = {event["host"] for rank in range(4) for event in read_events(run.events_file(rank), "start")}
    assert hosts == {"node0", "node1"}
    says_the_same(RunResult(run.path, read_summary(run.summary_file)), alone)


@pytest.mark.parametrize(
    ("verb", "changes"),
    [(("check", "run.yaml", "--ranks", "1,3", "--steps", "3"), ROWS), (TRAIN, ROWS), (TOPICS, TEXTS), (TREES, TABLE)],
)
def test_three_nodes_with_different_files_refuse_and_with_the_same_agree(tmp_path, verb, changes):
    for name, third in (("same", {}), ("other", changes)):
        for node in range(3):
            write_files(tmp_path / f"{name}{node}", third if node == 2 else {})
        places = {node: f"cd {tmp_path / f'{name}{node}'}" for node in range(3)}
        with nodes(3, tmp_path) as machines:
            command = [*PACELINE, *verb, "--out", str(tmp_path / f"runs-{name}")]
            codes, said = outcome(machines.start_ranks(command, before=places), 200)
        assert codes == [2 if third else 0] * 3, said
        assert ("on rank 2 (node2)" in said[0]) == bool(third), said


def test_check_across_nodes(lm_file, tmp_path):
    words = ["check", str(lm_file), "--ranks", "1,2", "--steps", "4", "--out", str(tmp_path / "runs")]
    codes, said = on_two_nodes(tmp_path, *words)
    assert codes == [0, 0], said
    assert "the answer is the same within 1e-05 over 4 steps" in said[0]
    assert "the answer" not in said[1]
    ranks = {path.name: len(list((path / "events").iterdir())) for path in (tmp_path / "runs").iterdir()}
    assert sorted(ranks.values()) == [1, 2], "the reference is one rank, whatever the launcher started"


def test_a_run_folder_that_is_not_shared_is_refused_before_the_first_step(lm_file, tmp_path):
    (tmp_path / "runs").mkdir()
    own = {1: f"mount -t tmpfs none {tmp_path / 'runs'}"}
    codes, said = on_two_nodes(tmp_path, "train", str(lm_file), "--quiet", "--out", str(tmp_path / "runs"), before=own)
    assert codes == [1, 1]
    assert "rank 1 on node1 does not see" in said[0]
    assert "all ranks must share the run folder" in said[0]
    assert not read_steps(RunDir(tmp_path / "runs" / "nodes").events_file(0))


def test_a_node_that_cannot_start_is_named_by_the_others(lm_file, tmp_path):
    """Our package is not there, or another thing: nobody comes from it."""
    words = ["--quiet", "--out", str(tmp_path / "runs"), "parallel.timeout_s=10"]
    with nodes(2, tmp_path) as found:
        began = time.monotonic()
        ranks = found.start_ranks([*PACELINE, "train", str(lm_file), *words], before={1: "false"})
        codes, said = outcome(ranks)
    assert codes[0] == 1
    assert "could not join the 2 ranks at node0" in said[0]
    assert "timed out waiting for rank 1" in said[0]
    assert time.monotonic() - began < 300


def test_clocks_that_differ_change_nothing(lm_file, alone, tmp_path, monkeypatch):
    """One node is a day behind, the other jumps ahead by an hour in the middle of the run."""
    clock = Path(__file__).parents[1] / "soak" / "jumping_clock"
    monkeypatch.setenv("PYTHONPATH", str(clock), prepend=os.pathsep)
    words = ["train", str(lm_file), "--quiet", "--out", str(tmp_path / "runs")]
    clocks = {0: "export CLOCK_JUMPS='0 -86400'", 1: "export CLOCK_JUMPS='10 3600'"}
    codes, said = on_two_nodes(tmp_path, *words, before=clocks)
    assert codes == [0, 0], said
    run = RunDir(tmp_path / "runs" / "nodes")
    first, second = ([event["t"] for event in read_events(run.events_file(rank))] for rank in range(2))
    assert 86300 < min(second) - min(first) < 90000
    assert 3600 < max(second) - min(second) < 7200
    says_the_same(RunResult(run.path, read_summary(run.summary_file)), alone)


def test_data_are_prepared_once_per_node(lm_file, tmp_path):
    """Each node has a cache of its own, which its two ranks share."""
    cache, *disks = folders = [tmp_path / name for name in ("cache", "disk0", "disk1")]
    for folder in folders:
        folder.mkdir()
    own = {node: f"mount --bind {disk} {cache}" for node, disk in enumerate(disks)}
    words = ["train", str(lm_file), "--out", str(tmp_path / "runs"), f"data.cache={cache}"]
    codes, said = on_two_nodes(tmp_path, *words, each=2, before=own)
    assert codes == [0] * 4, said
    prepared = [sorted(path.name for path in disk.iterdir()) for disk in disks]
    assert prepared[0] == prepared[1] != []
    assert not any(cache.iterdir())
