"""Heartbeats, and which rank is named when one does not answer: real processes, in the states that count."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from conftest import REPOSITORY
from paceline.errors import RankUnresponsive, RunFailed
from paceline.launch import hang_diagnosis
from paceline.launch.environment import RankInfo
from paceline.launch.hang_diagnosis import ProcessMonitor, WaitingRank, describe_position, find_silent_rank
from paceline.launch.hang_traces import Frame, fetch_stacks, list_children, read_stacks, trace_file
from paceline.launch.heartbeat import Beat, Heartbeat, read_beats, read_process_state
from paceline.launch.root_cause import describe_exception

TWO = RankInfo(0, 2, 0, 2, "paceline", "127.0.0.1", 1)
TOO_LONG_S = 60.0
PATIENT = """
import os, sys, time
from pathlib import Path
from paceline.launch.environment import RankInfo
from paceline.launch.heartbeat import Heartbeat
from paceline.launch.hang_traces import enable_stack_dump

def _answer():
    return wait_for_a_lock()

def wait_for_a_lock():
    time.sleep(300)

def be_a_worker():
    enable_stack_dump()
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    _answer()

beat = Heartbeat(Path(sys.argv[1]), RankInfo(1, 2, 1, 2, "paceline", "127.0.0.1", 1), float(sys.argv[2]))
beat("data", 3)
if os.fork() == 0:
    be_a_worker()
wait_for_a_lock()
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """(folder, rank 1 that waits for its data worker in step 4, its worker); it leaves its stack at once."""
    folder = tmp_path_factory.mktemp("run") / "heartbeats"
    file = folder.parent / "workers.py"
    file.write_text(PATIENT)
    process = subprocess.Popen([sys.executable, file, folder, "0.1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    until(lambda: read_stacks(trace_file(folder, 1, "stack")))
    (worker,) = list_children(process.pid)
    yield folder, process.pid, worker
    for pid in (worker, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def until(condition):
    deadline = time.monotonic() + TOO_LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting(folder, phase="step", step=3, where="all_reduce, called by finish (step.py:1)"):
    """Rank 0, as this process."""
    with Heartbeat(folder, TWO, 300.0) as beat:
        beat(phase, step)
        (mine, *_) = read_beats(folder)
    return WaitingRank(mine, where)


def others(patient, *ranks):
    """Other ranks of this machine, in step 4."""
    beat = read_beats(patient[0])[1]
    return [replace(beat, rank=rank, phase="step") for rank in ranks]


def in_collective(function, file):
    torch = "/site-packages/torch/distributed/distributed_c10d.py"
    calls = [f'  File "{torch}", line 9 in {function}', f'  File "/home/me/own.py", line 41 in {file}']
    return "Thread 0x1 (most recent call first):\n" + "\n".join(calls) + "\n"


def test_a_heartbeat_says_where_a_rank_is_and_is_one_line_however_often_it_beats(tmp_path):
    with Heartbeat(tmp_path / "heartbeats", TWO, 300.0) as beat:
        for step in (99_999, 7):
            beat("evaluation", step)
        (found,) = read_beats(tmp_path / "heartbeats")
        assert (found.rank, found.pid, found.step, found.phase) == (0, os.getpid(), 7, "evaluation")
        assert found.state in ("R", "S")
        assert found.description == "in the evaluation after step 7"
        beat("end", None)
        (text,) = (tmp_path / "heartbeats" / "rank0.json").read_text().splitlines()
        assert (json.loads(text)["phase"], json.loads(text)["step"]) == ("end", 7)
        beat.remove()
    assert not any(tmp_path.iterdir()), "a run that has ended leaves none"


def test_what_cannot_be_written_or_read_costs_no_run_and_no_link_is_followed(tmp_path):
    (tmp_path / "file").write_text("mine")
    with Heartbeat(tmp_path / "file", TWO, 300.0) as beat:
        beat("step", 1)
    assert read_beats(tmp_path / "file") == []
    fine = {"rank": 1, "host": "a", "pid": 1, "born": 1, "step": 1, "phase": "step", "t": 1.0}
    for rank, text in enumerate(['{"rank": 0', "[]", json.dumps(fine | {"phase": "lunch"}), json.dumps(fine)]):
        (tmp_path / f"rank{rank}.json").write_text(text)
    assert [beat.rank for beat in read_beats(tmp_path)] == [1]
    (tmp_path / "rank0.json").unlink()
    (tmp_path / "rank0.json").symlink_to(tmp_path / "file")
    with Heartbeat(tmp_path, TWO, 300.0) as beat:
        beat("step", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_positions_follow_the_course_of_a_run():
    course = [("start", 0), ("data", 0), ("step", 0), ("evaluation", 1), ("checkpoint", 1), ("data", 1), ("end", 1)]
    positions = [Beat(0, "a", 1, 1, step, phase, 0.0).position for phase, step in course]
    assert positions == sorted(positions)


def test_who_is_behind_is_named_with_the_line_its_data_worker_is_at(patient):
    folder, pid, worker = patient
    mine = waiting(folder)
    found = find_silent_rank(folder, [read_beats(folder)[1]], mine)
    assert found.rank == 1
    said = str(found)
    assert f"(pid {pid}) did not answer in time: it is waiting for the samples of step 4; its data worker" in said
    assert f"(pid {worker})" in said
    assert "in wait_for_a_lock" in said
    assert said.endswith("rank 0 waited in all_reduce, called by finish (step.py:1), in step 4")
    assert str(describe_exception(0, found).error) == said, "the survivor is not named as the culprit"
    os.kill(worker, signal.SIGSTOP)
    until(lambda: read_process_state(worker)[0] == "T")
    said = str(find_silent_rank(folder, [read_beats(folder)[1]], waiting(folder)))
    os.kill(worker, signal.SIGCONT)
    assert f"a signal such as SIGSTOP has stopped its data worker (pid {worker})" in said


def test_a_stopped_rank_is_named_whatever_it_was_at(patient):
    folder, pid, _ = patient
    os.kill(pid, signal.SIGSTOP)
    until(lambda: read_process_state(pid)[0] == "T")
    monitor = ProcessMonitor(folder, timeout_s=0.0, after_s=0.0)
    assert monitor.find_stopped({1: pid, 0: os.getpid()}) == [1]
    said = str(find_silent_rank(folder, [read_beats(folder)[1]], waiting(folder, "start", 0)))
    assert "has stopped it waiting for the samples of step 4; its stack" in said
    until(lambda: read_process_state(pid)[0] != "T")
    unheard = monitor.describe_stopped(7, os.getpid())
    assert str(unheard).endswith("has stopped it while it started")


def test_ranks_in_different_collectives_are_both_named(patient, tmp_path):
    for rank in (1, 2):
        trace_file(tmp_path, rank, "stack").write_text(in_collective("broadcast", "loss"))
    near, far = others(patient, 1, 2)
    far, mine = replace(far, host="elsewhere"), waiting(tmp_path)
    said = str(find_silent_rank(tmp_path, [near], mine))
    assert said.startswith("the ranks wait for each other in different collectives: rank 1 on ")
    assert "in broadcast, called by loss (own.py:41), in step 4; rank 0 waited in all_reduce, called by finish" in said
    same = WaitingRank(mine.beat, "broadcast, called by loss (own.py:41)")
    assert find_silent_rank(tmp_path, [near], same) is None
    assert "look at the network between elsewhere and " in str(find_silent_rank(tmp_path, [near, far], same))


def test_of_several_ranks_in_a_step_the_one_that_waits_for_nobody_is_named(patient, tmp_path):
    for rank in (1, 3):
        trace_file(tmp_path, rank, "stack").write_text(in_collective("all_reduce", "finish"))
    own = 'Thread 0x1 (most recent call first):\n  File "/home/me/own.py", line 7 in loss\n'
    trace_file(tmp_path, 2, "stack").write_text(own)
    found = find_silent_rank(tmp_path, others(patient, 1, 2, 3), waiting(tmp_path))
    assert found.rank == 2
    assert "it is in step 4; its stack, the newest call first" in str(found)
    assert 'File "/home/me/own.py", line 7, in loss' in str(found)


def test_what_torch_recorded_tells_ranks_apart_whose_collectives_run_on_a_device(patient, tmp_path):
    """Their stacks are wherever Python waits for the device."""
    reading = 'Thread 0x1 (most recent call first):\n  File "/home/me/loop.py", line 7 in read\n'
    calls = {0: ("all_reduce", 12), 1: ("all_reduce", 12), 2: ("broadcast", 11)}
    for rank, (name, number) in calls.items():
        trace_file(tmp_path, rank, "stack").write_text(reading)
        call = {"group": "nccl 0", "number": number, "name": name, "done": False}
        trace_file(tmp_path, rank, "collectives").write_text(json.dumps({"nccl 0": call}))
    mine = waiting(tmp_path, where="all_reduce, number 12 of group nccl 0")
    peers = others(patient, 1, 2)
    found = find_silent_rank(tmp_path, peers, mine)
    assert found.rank == 2
    assert "rank 2 on" in str(found)
    assert "in broadcast, number 11 of group nccl 0, in step 4; rank 0 waited in all_reduce, number 12" in str(found)
    assert find_silent_rank(tmp_path, peers[:1], mine) is None, "both wait in the same place, on one machine"


def test_a_rank_that_goes_on_after_it_was_asked_blames_nobody_and_other_errors_stay(patient, tmp_path):
    folder, *_ = patient
    error = RuntimeError("timed out after 15 s")
    with Heartbeat(folder, TWO, 300.0) as beat:
        beat("step", 3)
        assert isinstance(hang_diagnosis.name_silent_rank(error, folder, TWO), RankUnresponsive)
        trace_file(folder, 0, "asked").write_text("Thread 0x1 (most recent call first):\n")
        assert hang_diagnosis.name_silent_rank(error, folder, TWO) is error
    for other in (RunFailed("the disk is full"), RuntimeError("closed by peer"), RankUnresponsive(1, "gone")):
        assert hang_diagnosis.name_silent_rank(other, tmp_path, TWO) is other


def test_of_several_stacks_the_first_counts(tmp_path):
    def dump(*functions):
        thread = 'Thread 0x{} (most recent call first):\n  File "a.py", line 1 in {}'
        return "\n\n".join(thread.format(*one) for one in enumerate(functions)) + "\n"

    (tmp_path / "stack").write_text(dump("data", "main") + "Timeout (0:00:06)!\n" + dump("data", "later"))
    assert [stack[0].function for stack in read_stacks(tmp_path / "stack")] == ["main", "data"]
    assert fetch_stacks(os.getpid()) == fetch_stacks(1) == []  # processes that the signal would kill


def test_where_a_stack_is():
    own, torch = Frame("/home/me/own.py", 3, "batch"), "/x/site-packages/torch/distributed/distributed_c10d.py"
    assert describe_position((Frame("/usr/lib/python3.11/queue.py", 1, "get"), own)) == "batch (own.py:3)"
    gathering = (Frame(torch, 1, "all_gather"), Frame(torch, 2, "all_gather_object"), own)
    assert describe_position(gathering) == "all_gather_object, called by batch (own.py:3)"
    assert hang_diagnosis.find_collective((own,)) == ""


@pytest.mark.parametrize("call", ["WORKER_CALL", "PREFETCH_CALL", "WAIT_FOR_WRITER_CALL", "WRITER_CALL"])
def test_functions_that_are_looked_for_in_stacks_exist(call):
    function, file = getattr(hang_diagnosis, call)
    (source,) = [path for path in (REPOSITORY / "src/paceline").rglob("*.py") if path.match(f"*/{file}")]
    assert f"def {function}(" in source.read_text()
