"""Each check on this machine, with a fault made for it: what is wrong is found, and the line to type is there."""

import resource
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.diagnostics import device_checks, network_checks, system_checks
from paceline.diagnostics.doctor import CHECKS, merge_results
from paceline.diagnostics.results import CheckContext, CheckResult, Health, run_checks
from paceline.launch.environment import RankInfo


def only(findings):
    (finding,) = findings
    return finding


def test_every_check_answers_on_a_machine_without_devices_and_network(tmp_path):
    found = run_checks(CHECKS, CheckContext(tmp_path, {}), "here")
    assert {finding.topic for finding in found} == {"versions", "devices", "network", "files", "limits", "data"}
    assert all(finding.found and finding.host == "here" for finding in found)
    assert not [finding for finding in found if "could not be checked" in finding.found]
    assert not list(tmp_path.iterdir()), "nothing is left in the folder"


def test_a_check_that_fails_is_a_finding_and_no_traceback():
    finding = only(run_checks({"files": [lambda _: Path("/nowhere").stat()]}, CheckContext(), "n1"))
    assert finding.verdict is Health.LOOK
    assert finding.found.startswith("could not be checked: FileNotFoundError: ")


@pytest.mark.parametrize(
    ("kind", "check"),
    [(resource.RLIMIT_NOFILE, system_checks.check_open_files), (resource.RLIMIT_NPROC, system_checks.check_processes)],
)
def test_a_low_limit_is_wrong(kind, check):
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (600, hard))
        finding = only(check(CheckContext()))
    finally:
        resource.setrlimit(kind, (soft, hard))
    assert (finding.verdict, finding.found) == (Health.WRONG, "600")
    assert finding.remedy.startswith("ulimit -")


def test_a_limit_that_cannot_be_raised_here_is_for_an_administrator():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from paceline.diagnostics import results, system_checks\n"
        "print(next(system_checks.check_open_files(results.CheckContext())).remedy)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("no more is allowed here: ask an administrator for  * hard nofile 65536 ")


CROWDED = RankInfo(0, 64, 0, 64, "torchrun", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("check", "environ", "verdict", "remedy"),
    [
        (system_checks.check_cores, {"OMP_NUM_THREADS": "64"}, "look", "export OMP_NUM_THREADS=1"),
        (system_checks.check_disk_speed, {}, "wrong", "write elsewhere with  --out FOLDER, or make room"),
        (network_checks.check_interface, {"GLOO_SOCKET_IFNAME": "ib7"}, "wrong", "unset GLOO_SOCKET_IFNAME"),
        (network_checks.check_variables, {"NCCL_DEBUG": "info"}, "look", "unset NCCL_DEBUG"),
    ],
)
def test_a_fault_has_its_remedy(check, environ, verdict, remedy):
    finding, *_ = check(CheckContext(Path("/proc/nothing/runs"), environ, rank_info=CROWDED))
    assert (finding.verdict, finding.remedy) == (verdict, remedy)


def test_a_taken_port_is_found():
    with closing(socket.create_server(("", 0))) as server:
        port = server.getsockname()[1]
        finding = only(network_checks.check_port(CheckContext(environ={"MASTER_PORT": str(port)})))
    assert (finding.verdict, finding.found) == (Health.WRONG, f"{port} is taken")
    assert finding.remedy.endswith(f"export MASTER_PORT={port + 1}")


def test_the_odd_version_is_named():
    nodes = {host: {"torch": "2.13.0", "python": "3.11.7"} for host in ("n1", "n2", "n3")}
    assert only(system_checks.compare_versions(nodes)).found == "the same on all 3 nodes"
    nodes["n2"] = {"torch": "2.11.0", "python": "3.11.7"}
    finding = only(system_checks.compare_versions(nodes))
    assert (finding.check, finding.verdict, finding.host) == ("torch everywhere", Health.WRONG, "n2")
    assert (finding.found, finding.expected) == ("2.11.0 on n2", "2.13.0, as 2 other nodes have")


@pytest.mark.parametrize(
    ("rate", "others", "verdict"),
    [(95.0, [96.0], "ok"), (80.0, [81.0], "look"), (50.0, [51.0], "wrong"), (70.0, [99.0, 98.0], "wrong")],
)
def test_a_slow_device_is_found_by_its_data_sheet_and_by_its_neighbours(rate, others, verdict):
    finding = device_checks.judge_rate("products", rate, 100.0, dict(enumerate([rate, *others])), "", 1)
    assert finding.verdict == verdict
    assert ("the median here" in finding.expected) == (others[-1] > 90 and verdict == "wrong")


def test_the_data_of_a_run_file_are_loaded(small):
    finding = only(system_checks.check_loading(CheckContext(spec=small)))
    assert finding.found.endswith("samples/s by one rank")
    assert finding.verdict in (Health.OK, Health.LOOK)
    assert "which one device takes by the plan" in finding.expected
    lost = small.replace({"data.source": "csv", "data.path": "lost.csv"})
    finding = only(system_checks.check_loading(CheckContext(spec=lost)))
    assert finding.verdict is Health.WRONG
    assert "lost.csv" in finding.found


def test_nodes_that_agree_share_a_row():
    fine = CheckResult("limits", "cores", "2")
    wrong = CheckResult("limits", "cores", "1", verdict=Health.WRONG, host="n3")
    found = merge_results([[fine], [fine], [wrong]])
    assert [(finding.verdict.value, finding.host) for finding in found] == [("ok", "2 nodes"), ("wrong", "n3")]
