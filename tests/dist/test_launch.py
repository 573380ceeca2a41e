"""Launching, with real processes: what a rank gets, how a job ends, and what is left behind (nothing)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ending import alive, wait_until
from launch_work import LONG_S, fail, fail_while_a_peer_is_stuck, introduce, speak, stop_the_server

from paceline.errors import InternalError, RunFailed, UserError
from paceline.launch.environment import SINGLE_RANK, RankInfo
from paceline.launch.hang_diagnosis import ProcessMonitor
from paceline.launch.local import reserve_port, run_ranks
from paceline.launch.process_group import RankCores, divide_cores, join_ranks
from paceline.launch.signals import SECOND_INTERRUPT_S, StopRequest
from results import expect_error

HERE = Path(__file__).parent
QUICK_S = 100.0  # for a whole job with a failed rank on a busy machine; peers that are not ended work for LONG_S

# Calling run_ranks in this process.


def test_results_come_in_the_order_of_the_ranks_and_quietly(capfd):
    assert run_ranks(introduce, (), 3) == [(rank, 3, "paceline", "cpu", 6.0) for rank in range(3)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_ranks_say_is_heard_in_whole_lines(unbuffered, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    run_ranks(speak, (2000,), 2, preload=())
    for name, text in zip(("stdout", "stderr"), capfd.readouterr(), strict=True):
        said = sorted(f"rank {rank} line {line} on {name}" for rank in range(2) for line in range(2000))
        assert sorted(text.splitlines()) == said


def test_ranks_that_have_done_their_work_do_not_need_the_process_they_came_from(tmp_path):
    assert run_ranks(stop_the_server, (), 2, preload=(), monitor=ProcessMonitor(tmp_path, 0.5)) == [0, 1]


def test_the_process_that_starts_ranks_is_named_where_it_was_stopped_and_a_rank_waited_in_vain(tmp_path):
    monitor = ProcessMonitor(tmp_path, 60.0)
    with expect_error("rank-unresponsive", match="SIGSTOP", kind=RunFailed):
        run_ranks(stop_the_server, ("timed out waiting for clients",), 2, preload=(), monitor=monitor)


# From here on they come from a process that has imported torch already: what is new is how they end.


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("user", UserError, "data.path: is empty; type  data.path=FILE"),
        ("run", RunFailed, "rank 1: the loss is not finite at step 3"),
        ("exit", RunFailed, "rank 1 ended with exit code 3 and left no message"),
        ("sys.exit", RunFailed, "rank 1 ended with exit code 0 and left no message"),
        ("kill", RunFailed, "rank 1 was killed by SIGKILL (out of memory?)"),
    ],
)
def test_the_rank_that_failed_is_shown_and_no_other(how, kind, message, capfd):
    began_s = time.monotonic()
    with pytest.raises(kind) as caught:
        run_ranks(fail, (how,), 3)
    assert str(caught.value) == message
    assert time.monotonic() - began_s < QUICK_S
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("warm_ranks")
def test_our_own_bugs_come_with_the_traceback_of_that_rank():
    with pytest.raises(InternalError) as caught:
        run_ranks(fail, ("bug",), 2)
    assert str(caught.value) == "rank 1 failed with KeyError: 'no such step'"
    first, *rest = caught.value.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "in fail" in rest[0]
    assert rest[-1] == "KeyError: 'no such step'"


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("work", [(fail, ("bug", False)), (fail_while_a_peer_is_stuck, ())])
def test_peers_that_do_not_notice_are_ended(work):
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=r"1 .*(KeyError|ValueError)"):
        run_ranks(*work, 2)
    assert time.monotonic() - began_s < QUICK_S


def test_modules_that_cannot_be_imported_are_a_bug_of_ours():
    with pytest.raises(RunFailed, match="ModuleNotFoundError"):
        run_ranks(speak, (), 2, preload=("nowhere",))


# Calling run_ranks in a process of its own, to signal it.


def script(code, *args, text=None):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))}
    environ["PYTHONPATH"] = str(HERE)
    command = [sys.executable, *([code] if text is None else ["-"]), *map(str, args)]
    streams = {"stdin": subprocess.PIPE if text else subprocess.DEVNULL, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True, **streams)


@pytest.fixture
def job(tmp_path):
    """A launcher with two ranks that work until they are stopped; all have begun, and none survives the test."""
    started = []

    def start(saving_s=0.0):
        file = tmp_path / "job.py"
        file.write_text(
            "from launch_work import work_until_stopped\nfrom paceline.launch.local import run_ranks\n"
            f"print(run_ranks(work_until_stopped, ({str(tmp_path)!r}, {saving_s}), 2))\n"
        )
        launcher = script(file)
        started.append(launcher)
        files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), launcher)
        pids = [int(file.read_text()) for file in files]
        seed = psutil.Process(pids[0]).ppid()
        assert wait_until(lambda: ignores(seed, signal.SIGUSR1), launcher)
        return launcher, pids

    yield start
    for launcher in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def ignores(pid, number):
    ignored = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(ignored[1], 16) >> (number - 1) & 1


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "launcher"),
        (signal.SIGHUP, "launcher"),
        (signal.SIGINT, "everyone"),  # as a terminal does it
        (signal.SIGUSR1, "everyone"),  # as Slurm does it
    ],
)
def test_a_signal_lets_the_ranks_save_and_return(job, tmp_path, number, to):
    launcher, _ = job(saving_s=0.2)
    if to == "launcher":
        launcher.send_signal(number)
    else:
        os.killpg(launcher.pid, number)
        os.killpg(launcher.pid, number)
    out, err = launcher.communicate(timeout=QUICK_S)
    assert (launcher.returncode, out) == (0, "[0, 1]\n"), err
    assert err.startswith(f"{number.name}: the ranks stop when they have saved")
    assert len(err.splitlines()) == 1
    assert len(list(tmp_path.glob("saved*"))) == 2


def test_a_second_ctrl_c_kills_at_once(job):
    launcher, pids = job(saving_s=LONG_S)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.stderr.readline().startswith("SIGINT: the ranks stop when they have saved")
    time.sleep(1.1 * SECOND_INTERRUPT_S)
    assert all(map(alive, pids))
    os.killpg(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate(timeout=QUICK_S)
    assert err.splitlines()[-1] == "paceline.errors.RunFailed: killed by the second Ctrl-C"
    assert not any(map(alive, pids))


def test_ranks_outlive_no_launcher(job, tmp_path):
    launcher, pids = job()
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)))
    assert len(list(tmp_path.glob("saved*"))) == 2
    launcher.wait()
    wait_until(lambda: not session(launcher.pid))


def session(leader):
    """Processes that are left of the session of a launcher."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == leader and state != "Z":
                found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_before_the_ranks_are_there(number, tmp_path):
    """They import something that takes long, and have not been forked yet."""
    (tmp_path / "slow.py").write_text(f"import os, time\nos.write(1, b'importing\\n')\ntime.sleep({LONG_S})\n")
    file = tmp_path / "job.py"
    file.write_text(
        "from paceline.launch.exit_codes import exit_on_error\nfrom paceline.launch.local import run_ranks\nimport os\n"
        "with exit_on_error(): run_ranks(os.getpid, (), 2, ['slow'])\n"
    )
    launcher = script(file)
    assert launcher.stdout.readline() == "importing\n"
    os.killpg(launcher.pid, number)
    _, err = launcher.communicate(timeout=QUICK_S)
    assert launcher.returncode == 128 + number
    assert err.splitlines()[-1].endswith(f"stopped by {number.name} before the ranks could save and stop")
    assert "KeyboardInterrupt" not in err


def test_a_script_needs_no_guard_and_may_come_from_stdin():
    code = "import launch_work, paceline.launch.local as l\nprint(len(l.run_ranks(launch_work.introduce, (), 2)))\n"
    assert script("-", text=code).communicate(code, timeout=QUICK_S)[0] == "2\n"


@pytest.mark.parametrize("call", ["run_ranks(mine, (), 2)", "run_ranks(print, (Mine(),), 2)"])
def test_what_is_defined_in_the_script_is_refused(tmp_path, call):
    file = tmp_path / "job.py"
    file.write_text(f"from paceline.launch.local import run_ranks\ndef mine(): ...\nclass Mine: ...\n{call}\n")
    _, err = script(file).communicate(timeout=QUICK_S)
    assert "UserError: " in err
    assert "ine is defined in the running script" in err


@pytest.mark.skipif(shutil.which("mpirun.mpich") is None, reason="mpich is not installed")
def test_under_mpich():
    """test_launchers.py has torchrun and Open MPI."""
    command = ["mpirun.mpich", "-np", "2", sys.executable, "-c", "import launch_work; print(launch_work.introduce())"]
    with reserve_port() as port:
        environ = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
        run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=QUICK_S)
    assert run.returncode == 0, run.stderr
    found = sorted(re.findall(r"\(.*?\)", run.stdout))
    assert found == ["(0, 2, 'mpirun', 'cpu', 3.0)", "(1, 2, 'mpirun', 'cpu', 3.0)"]


# One rank at a time.


def test_alone_there_is_no_group():
    threads = torch.get_num_threads()
    with join_ranks(SINGLE_RANK, "cpu", 1, 5.0) as device:
        assert device == torch.device("cpu")
        assert torch.get_num_threads() == 1
        assert not dist.is_initialized()
    torch.set_num_threads(threads)


def test_a_peer_that_never_comes():
    with reserve_port() as port:
        place = RankInfo(0, 2, 0, 2, "torchrun", "127.0.0.1", port)
        with pytest.raises(RunFailed, match="waiting for rank 1") as error, join_ranks(place, "cpu", 1, 1.0):
            pass
    assert error.value.code == "rank-unresponsive"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has the devices")
def test_more_ranks_than_devices():
    place = RankInfo(0, 2, 0, 2, "paceline", "127.0.0.1", 29688)
    with pytest.raises(UserError) as error, join_ranks(place, "cuda", 1, 1.0):
        pass
    assert (error.value.code, error.value.key) == ("unavailable", "parallel.ranks")


def test_cores_are_divided_among_those_who_share_them():
    def share(*cores, other_host=()):
        everyone = [RankCores("a", frozenset(own)) for own in cores]
        everyone += [RankCores("b", frozenset(own)) for own in other_host]
        return [divide_cores(holding, everyone) for holding in everyone if holding.host == "a"]

    assert (share(range(8)), share(range(8), range(8)), share(range(4), range(4, 8))) == ([8], [4, 4], [4, 4])
    assert share(range(8), range(8), range(8)) == [2, 2, 2]
    assert share(range(2), range(2), range(2, 6)) == [1, 1, 4]
    assert share(range(1), range(1)) == [1, 1]
    assert share(range(8), other_host=[range(8)]) == [8]


def test_a_stop_request_is_a_flag_and_gives_the_handlers_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert stop.signal_name == "SIGUSR1"
    assert {number: signal.getsignal(number) for number in before} == before
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    signal.signal(signal.SIGHUP, hangup)
    with ThreadPoolExecutor(1) as pool, pool.submit(StopRequest().__enter__).result() as stop:
        assert not stop.requested, "outside the main thread there are no handlers"
