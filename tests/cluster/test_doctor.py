"""The doctor on three nodes: healthy ones are all well within 30 s; a slow link, a cut one and a closed port are named.

pytest tests/cluster/test_doctor.py --import-mode=importlib
"""

import json
import os
import subprocess
import sys

import pytest
from nodes import nodes, why_not

LIMIT_S = 30.0


@pytest.fixture
def three(tmp_path):
    if reason := why_not():
        pytest.skip(f"no nodes here: {reason}")
    with nodes(3, tmp_path) as found:
        yield found


def examined(three, tmp_path, before=None):
    """What each rank has said, and its exit code."""
    command = [sys.executable, "-m", "paceline", "doctor", "--out", str(tmp_path / "runs"), "--json"]
    ranks = three.start_ranks(command, before=before)
    told = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, json.loads(text[text.index("{") :])) for rank, text in zip(ranks, told, strict=True)]


def wrong(told):
    return {finding["check"]: finding["found"] for finding in told["findings"] if finding["verdict"] == "wrong"}


def inside(three, node, *words):
    subprocess.run(["ip", "netns", "exec", f"{three.prefix}-{node}", *words], check=True, capture_output=True)


def test_healthy_nodes_are_all_well_in_time(three, tmp_path):
    (code, told), *others = examined(three, tmp_path)
    print(f"{told['seconds']} s")
    assert told["hosts"] == ["node0", "node1", "node2"]
    assert (code, wrong(told)) == (0, {})
    assert [(code, other["findings"]) for code, other in others] == [(0, [])] * 2
    if os.getloadavg()[0] <= len(os.sched_getaffinity(0)) + 1:  # three nodes share these cores with whatever else runs
        assert told["seconds"] < LIMIT_S


def test_the_slow_link_of_one_node_is_named(three, tmp_path):
    shaping = ("root", "tbf", "rate", "100mbit", "burst", "256kb", "latency", "50ms")
    inside(three, 2, "tc", "qdisc", "replace", "dev", "eth0", *shaping)
    code, told = examined(three, tmp_path)[0]
    slow = [finding["found"] for finding in told["findings"] if finding["check"] == "link"]
    assert code == 1
    assert {found.split(":")[0] for found in slow} == {"node2 to node0", "node2 to node1"}, "what it sends is shaped"


def test_a_node_that_is_cut_off_is_named(three, tmp_path):
    three.cut(2)
    first, _, last = examined(three, tmp_path)
    assert first[0] == last[0] == 1
    assert wrong(first[1])["meeting"].startswith("rank 2 of 3 has not come to node0:")
    assert wrong(last[1])["port of rank 0"].startswith(("no answer from node0:", "node0:"))


def test_under_srun(lab, tmp_path):
    lab.until_ready()
    command = [sys.executable, "-m", "paceline", "doctor", "--out", str(tmp_path), "--json"]
    out = lab.ask("srun", "--nodes=2", "--ntasks-per-node=1", *command)
    told = [json.JSONDecoder().raw_decode(out, at)[0] for at in range(len(out)) if out.startswith('{\n  "healthy"', at)]
    (main,) = [one for one in told if one["findings"]]
    assert len(main["hosts"]) == 2
    assert wrong(main) == {}
