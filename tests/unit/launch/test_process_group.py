"""What carries messages between ranks."""

import ast

import pytest
import torch.distributed as dist

from conftest import REPOSITORY
from paceline.errors import UserError
from paceline.launch.process_group import _backend_name


@pytest.mark.parametrize(
    ("backend", "device", "carrier"),
    [
        ("auto", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
        ("auto", "cuda", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("gloo", "cuda", "gloo"),
    ],
)
def test_the_backend_in_torchs_words(backend, device, carrier):
    assert _backend_name(backend, device) == carrier


@pytest.mark.parametrize(("backend", "said"), [("nccl", "these ranks have none; use gloo"), ("mpi", "without MPI")])
def test_a_backend_that_cannot_be_is_refused(backend, said):
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(UserError, match=said):
        _backend_name(backend, "cpu")


# Whoever waits for other ranks gives up after the time that the run file states.

MADE_WITH_A_TIME = {"init_process_group", "new_group", "TCPStore", "FileStore", "monitored_barrier", "rendezvous"}
MADE_HERE_ALONE = {
    "init_device_mesh",
    "DeviceMesh",
    "_flatten",
    "new_group",
    "new_subgroups",
    "split_group",
}


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
