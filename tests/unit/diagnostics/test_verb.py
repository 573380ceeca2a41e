"""The command: a table for people, JSON for programs, and an exit code that says whether something is wrong."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import paceline
from paceline.cli.doctor import render_examination
from paceline.diagnostics import network_checks
from paceline.diagnostics.nodes import _merge_answers, examine_nodes
from paceline.diagnostics.results import CheckResult, Examination, Health


@pytest.fixture
def brief(monkeypatch):
    """The checks that take no time."""
    brief = {"network": (network_checks.check_port, network_checks.check_interface)}
    monkeypatch.setattr("paceline.diagnostics.doctor.CHECKS", brief)


def test_a_healthy_machine_is_all_well(brief, tmp_path, ask):
    assert [finding.topic for finding in paceline.doctor(out=tmp_path).findings] == ["network", "network"]
    answer = ask("doctor", "--out", tmp_path)
    assert (answer.code, "this machine, 2 checks in 0 s: " in answer.out) == (0, True)
    assert max(map(len, answer.out.splitlines())) <= 100


def test_json_and_exit_code(brief, tmp_path, monkeypatch, ask):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    answer = ask("doctor", "--out", tmp_path, "--json")
    told = json.loads(answer.out)
    assert (answer.code, told["healthy"]) == (1, False)
    assert [f["remedy"] for f in told["findings"] if f["verdict"] == "wrong"] == ["unset NCCL_SOCKET_IFNAME"]


def test_a_node_where_it_cannot_start_is_named():
    found = examine_nodes(["n1", "n2"], [], Path(), by="sh -c 'echo no route to $0 >&2; exit 255'")
    assert [(finding.found, finding.host) for finding in found.findings] == [
        ("n1: no route to n1", "n1"),
        ("n2: no route to n2", "n2"),
    ]
    assert not found.healthy


def test_what_a_node_could_not_send_to_the_first_is_added():
    mine = Examination([CheckResult("limits", "cores", "2")], 1.0, ["n1"])
    theirs = Examination([CheckResult("network", "port of rank 0", "no answer", verdict=Health.WRONG)], 1.0, ["n2"])
    first, second = (CompletedProcess([], 0, json.dumps(one.as_json()), "") for one in (mine, theirs))
    found = _merge_answers(["n1", "n2"], [first, second], 2.0)
    assert [finding.check for finding in found.findings] == ["cores", "port of rank 0"]
    assert (found.hosts, found.healthy) == (["n1", "n2"], False)
    found = _merge_answers(["n1", "n2"], [first, CompletedProcess([], 0, "", "")], 2.0)
    assert (found.healthy, len(found.findings)) == (True, 1)


def test_the_table_names_the_node_of_what_is_wrong_and_what_to_do():
    findings = [
        CheckResult("limits", "cores", "2 of 2", host="all nodes"),
        CheckResult("limits", "open files", "512", "1,024 or more", Health.WRONG, "ulimit -n 65536", "n2"),
    ]
    lines = [str(part) for part in render_examination(Examination(findings, 3.2, ["n1", "n2"]))]
    assert lines[-2:] == [
        "wrong: open files on n2: 512  →  ulimit -n 65536",
        "2 nodes, 2 checks in 3 s: 1 wrong",
    ]
