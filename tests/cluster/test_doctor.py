"""The doctor on several nodes: healthy ones are all well within 30 s; a slow link, a cut one, a closed and a taken port
are named. tests/dist/test_doctor.py has other versions, a full disk and a low limit.

pytest tests/cluster/test_doctor.py --import-mode=importlib
"""

import json
import os
import subprocess
import sys
import time

import pytest
from nodes import PORT, nodes, why_not

LIMIT_S = 30.0


@pytest.fixture
def three(tmp_path):
    if reason := why_not():
        pytest.skip(f"no nodes here: {reason}")
    with nodes(3, tmp_path) as found:
        yield found


def examined(found, tmp_path):
    """Of each rank, its exit code and what it has said; nothing, where it told the first."""
    command = [sys.executable, "-m", "paceline", "doctor", "--out", str(tmp_path / "runs"), "--json"]
    ranks = found.start_ranks(command)
    told = [rank.communicate(timeout=300)[0] for rank in ranks]
    read = [json.loads(text[text.index("{") :]) if "{" in text else None for text in told]
    return [(rank.returncode, one) for rank, one in zip(ranks, read, strict=True)]


def wrong(told):
    return {finding["check"]: finding["found"] for finding in told["findings"] if finding["verdict"] == "wrong"}


def inside(three, node, *words):
    subprocess.run(["ip", "netns", "exec", f"{three.prefix}-{node}", *words], check=True, capture_output=True)


@pytest.mark.parametrize("count", [2, 3])
def test_healthy_nodes_are_all_well_in_time(count, tmp_path):
    if reason := why_not():
        pytest.skip(f"no nodes here: {reason}")
    with nodes(count, tmp_path) as healthy:
        began = time.monotonic()
        (code, told), *others = examined(healthy, tmp_path)
        print(f"{told['seconds']} s, with the start {time.monotonic() - began:.1f} s")
    assert told["hosts"] == [f"node{node}" for node in range(count)]
    assert (code, wrong(told)) == (0, {})
    assert others == [(0, None)] * (count - 1)
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
    assert wrong(last[1])["port of rank 0"].startswith("node0:")


def test_a_port_that_a_firewall_closes_is_named(three, tmp_path):
    inside(three, 0, "ip", "rule", "add", "sport", str(PORT), "blackhole")  # what it answers from there is lost
    first, *others = examined(three, tmp_path)
    assert wrong(first[1])["meeting"].startswith("rank 1, 2 of 3 has not come to node0:")
    for code, told in others:
        assert code == 1
        assert wrong(told)["port of rank 0"].startswith(f"node0:{PORT}: ")


def test_a_port_that_another_program_has_is_named(three, tmp_path):
    listen = f"import socket, time; s = socket.create_server(('', {PORT})); print(flush=True); time.sleep(600)"
    three.start(0, [sys.executable, "-c", listen], {}).stdout.readline()
    (code, told), *_ = examined(three, tmp_path)
    assert code == 1
    assert wrong(told)["port of rank 0"].startswith(f"node0:{PORT}: ")


def test_under_srun(lab, tmp_path):
    lab.until_ready()
    command = [sys.executable, "-m", "paceline", "doctor", "--out", str(tmp_path), "--json"]
    told = json.loads(lab.ask("srun", "--nodes=2", "--ntasks-per-node=1", *command))
    assert len(told["hosts"]) == 2
    assert wrong(told) == {}
