"""What carries messages between ranks: backends, timeouts, where they listen and which network they use."""

import ast

import pytest
import torch.distributed as dist

from conftest import REPOSITORY
from paceline.launch.environment import RankInfo
from paceline.launch.network import (
    GLOO,
    NCCL,
    apply_network_settings,
    choose_network_settings,
    find_interface,
    find_local_address,
    list_active_infiniband,
    open_listener,
)
from paceline.launch.process_group import _backend_name
from results import expect_error


def test_the_backend_in_torchs_words():
    assert [_backend_name(backend, "cpu") for backend in ("auto", "gloo")] == ["gloo", "gloo"]
    both = "cpu:gloo,cuda:nccl"
    assert [_backend_name(backend, "cuda") for backend in ("auto", "nccl", "gloo")] == [both, both, "gloo"]


@pytest.mark.parametrize(("backend", "code"), [("nccl", "conflict"), ("mpi", "unavailable")])
def test_a_backend_that_cannot_be_is_refused(backend, code):
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with expect_error(code, "parallel.backend"):
        _backend_name(backend, "cpu")


# Whoever waits for other ranks gives up after the time that the run file states.

MADE_WITH_A_TIME = {"init_process_group", "new_group", "TCPStore", "FileStore", "monitored_barrier", "rendezvous"}
MADE_HERE_ALONE = {"init_device_mesh", "DeviceMesh", "_flatten", "new_group", "new_subgroups", "split_group"}


def calls_without_time(source, module):
    """Groups and stores that would wait for as long as torch does, half an hour or for ever."""
    if not any(name in source for name in MADE_WITH_A_TIME | MADE_HERE_ALONE):
        return
    for node in ast.walk(ast.parse(source)):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if name == "_flatten" and isinstance(node.func, ast.Name):  # not the method of a mesh
            continue
        if name in MADE_HERE_ALONE and module != "paceline/launch/process_group.py":
            yield f"{module}:{node.lineno} {name}: use what paceline.launch.process_group has for it"
        if name in MADE_WITH_A_TIME and not any(word.arg == "timeout" for word in node.keywords):
            yield f"{module}:{node.lineno} {name}: without a timeout"


def test_every_group_and_store_has_a_time_after_which_it_gives_up():
    src = REPOSITORY / "src"
    files = sorted(src.rglob("*.py"))
    found = [call for f in files for call in calls_without_time(f.read_text("utf-8"), str(f.relative_to(src)))]
    assert not found
    planted = "import torch.distributed as dist\ndist.new_group([0])\ndist.TCPStore('a', 1)\n"
    assert len(list(calls_without_time(planted, "paceline/x.py"))) == 3


ONE_MACHINE = RankInfo(0, 2, 0, 2, "srun", "127.0.0.1", 0)
SEVERAL = RankInfo(0, 2, 0, 1, "srun", "127.0.0.1", 0)


def test_on_one_machine_all_stays_on_the_loopback():
    (setting,) = choose_network_settings(ONE_MACHINE, {}, cuda=True)
    assert (setting.name, setting.value, setting.reason) == (GLOO, "lo", "all ranks are on this machine")
    with open_listener(ONE_MACHINE) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_what_the_user_set_stays():
    found = choose_network_settings(SEVERAL, {GLOO: "eth7", NCCL: "ib0"}, cuda=True)
    assert [(setting.value, setting.ours) for setting in found] == [("eth7", False), ("ib0", False)]


def test_an_interface_that_is_not_here_is_rejected_before_the_ranks_meet():
    with expect_error("unavailable", GLOO):
        apply_network_settings(choose_network_settings(SEVERAL, {GLOO: "ib7"}, cuda=False))
    apply_network_settings(choose_network_settings(SEVERAL, {GLOO: "ib7,lo"}, cuda=False))


def test_between_machines_the_interface_is_the_one_that_leads_to_rank_0():
    own = find_local_address("198.51.100.1")  # an address of no machine: its way is the usual one
    if own is None:
        pytest.skip("this machine has no network")
    place = RankInfo(1, 4, 0, 2, "srun", own, 0)
    found = choose_network_settings(place, {}, cuda=True)
    assert [s.name for s in found] == [GLOO, NCCL]
    assert {s.value for s in found} == {find_interface(own)} != {""}
    assert found[0].reason == f"leads to rank 0 at {own}"
    with open_listener(place) as socket_:
        assert socket_.getsockname()[0] == own


def test_a_name_that_is_the_loopback_here_alone_does_not_hide_rank_0():
    """Other machines know another address by it."""
    assert choose_network_settings(SEVERAL, {}, cuda=False) == []
    with open_listener(SEVERAL) as found:
        assert found.getsockname()[0] == "0.0.0.0"


def test_an_address_of_another_machine_is_none_to_listen_at():
    with pytest.raises(OSError), open_listener(RankInfo(0, 2, 0, 2, "srun", "198.51.100.1", 0)):
        pass
    assert find_local_address("no such name.invalid") is None


def test_ports_of_a_fabric_that_are_up(tmp_path):
    for card, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert list_active_infiniband(tmp_path) == ["mlx5_0:1"]
