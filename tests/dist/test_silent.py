"""A rank that does not answer ends the run in the stated time, and is the one that is named.

Here is one of each kind; tests/cluster/test_silent_ranks.py has every phase and every rank.
"""

import json
import os
import signal
import time
from pathlib import Path

import freezing
import psutil
import pytest
import torch
import torch.distributed as dist
from ending import wait_until

from paceline import train
from paceline.errors import RankUnresponsive
from paceline.launch.environment import detect_rank
from paceline.launch.hang_diagnosis import ProcessMonitor
from paceline.launch.hang_traces import dump_own_calls, enable_flight_recorder
from paceline.launch.heartbeat import Heartbeat
from paceline.launch.local import run_ranks
from paceline.launch.process_group import create_device_mesh, create_subgroup, join_ranks
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("warm_ranks")


def freeze_one():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)


def test_a_launcher_ends_a_run_of_which_a_process_stays_stopped(tmp_path):
    with pytest.raises(RankUnresponsive, match="SIGSTOP") as error:
        run_ranks(freeze_one, (), 2, preload=(), monitor=ProcessMonitor(tmp_path, 0.3, 0.2))
    assert error.value.rank == 1


def freeze_before_it_is_heard():
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(lambda: any(p.status() == psutil.STATUS_STOPPED for p in psutil.Process().parent().children()))
    raise RuntimeError("could not join the ranks: timed out after 1 s: connection refused")


def test_a_rank_that_was_stopped_before_it_was_heard_is_named_by_the_launcher(tmp_path):
    """The other one waited for it in vain, and knows of nobody."""
    with pytest.raises(RankUnresponsive, match="while it started") as error:
        run_ranks(freeze_before_it_is_heard, (), 2, preload=(), monitor=ProcessMonitor(tmp_path, 60.0))
    assert error.value.rank == 0


def test_a_rank_frozen_while_it_writes_a_checkpoint_is_named_and_so_is_its_place(small, tmp_path, monkeypatch):
    monkeypatch.setenv(freezing.FREEZE, "writing 1")
    file = Path(freezing.__file__)
    changes = {"workload": f"{file}:Freezing", "train.steps": 2, "model.layers": 1, "parallel.ranks": 2}
    spec = small.replace({**changes, "parallel.timeout_s": 10})
    began = time.monotonic()
    with pytest.raises(RankUnresponsive) as caught:
        train(spec, tmp_path, show=False)
    assert time.monotonic() - began < 900, "not for half an hour"
    assert caught.value.rank == 1
    assert "step 2; its stack" in str(caught.value)
    (run,) = tmp_path.iterdir()
    assert "rank.py" in (run / "heartbeats" / "rank1.asked").read_text()
    (end,) = read_events(RunDir(run).events_file(0), "end")
    assert end["status"] == "failed"


def be_aborted(folder):
    """As NCCL does it to a rank that has waited for too long."""
    place = detect_rank(os.environ)
    with Heartbeat(Path(folder), place, 0.4) as beat:
        beat("step" if place.rank == 0 else "data", 3)
        if place.rank == 0:
            wait_until((Path(folder) / "rank1.json").exists)
        time.sleep(0.8 if place.rank == 0 else freezing.LONG_S)
        os.abort()


def test_behind_a_rank_that_was_aborted_is_the_one_that_it_waited_for(tmp_path, capfd):
    with pytest.raises(RankUnresponsive) as caught:
        run_ranks(be_aborted, (str(tmp_path),), 2, preload=(), monitor=ProcessMonitor(tmp_path, 0.4))
    said = str(caught.value)
    assert caught.value.rank == 1
    assert "it is waiting for the samples of step 4; its stack" in said
    assert "in be_aborted" in said
    assert "rank 0 waited in be_aborted (test_silent.py:" in said


def calls_while_one_waits(folder):
    place, seen = detect_rank(os.environ), Path(folder, "seen")
    enable_flight_recorder(os.environ)
    with join_ranks(place, "cpu", 1, 60.0):
        dist.broadcast(torch.zeros(1), 0)
        if place.rank == 0:
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            found = dump_own_calls()
            seen.touch()
            work.wait()
        else:
            while not seen.exists():
                time.sleep(0.01)
            found = dump_own_calls()
            dist.all_reduce(torch.zeros(1))
        dist.barrier()
    return json.loads(found)["gloo 0"]


def test_torch_knows_which_collectives_each_rank_has_called(tmp_path):
    first, second = run_ranks(calls_while_one_waits, (str(tmp_path),), 2)
    assert (first["name"], first["done"]) == ("all_reduce", False)
    assert (second["name"], second["number"]) == ("broadcast", first["number"] - 1)


def listening_addresses():
    """Of a rank that has joined, with groups of every kind."""
    with join_ranks(detect_rank(os.environ), "cpu", 1, 60.0):
        groups = [
            create_subgroup([0, 1]),
            create_subgroup(backend="gloo"),
            create_device_mesh("cpu", (2, 1), ("a", "b")).get_group("a"),
        ]
        times = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
        for group in groups:
            dist.barrier(group)
        found = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        dist.barrier()
    return found, times


def test_on_one_machine_ranks_listen_on_the_loopback_alone_and_every_group_has_the_stated_time():
    assert run_ranks(listening_addresses, (), 2) == [({"127.0.0.1"}, {60.0})] * 2
