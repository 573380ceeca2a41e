"""`paceline launch`: what a rank of a foreign command gets, how a job of them ends; nothing is left behind."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from ending import alive, wait_until

from paceline.launch.command import run_command_ranks
from paceline.launch.signals import SECOND_INTERRUPT_S

QUICK_S = 100.0
LONG_S = 300
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def shell(code):
    return ["bash", "-c", code]


def paceline(*words, **more):
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | more, start_new_session=True, **streams)


def answers(*words, **more):
    process = paceline(*words, **more)
    out, err = process.communicate(timeout=QUICK_S)
    return process.returncode, out, err


def test_each_rank_gets_the_variables_of_torchrun_and_its_words_as_they_are(tmp_path):
    code = 'printf "%s\\n" "$@" $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT > out$RANK'
    said = []
    words = ["--", "two words", "$HOME", "--lr=1"]
    assert run_command_ranks([*shell(f"cd {shlex.quote(str(tmp_path))}; {code}"), *words], 3, log=said.append) == 0
    assert said == []
    ranks = [(tmp_path / f"out{rank}").read_text().splitlines() for rank in range(3)]
    assert [rank[:3] for rank in ranks] == [words[1:]] * 3
    assert [rank[3:8] for rank in ranks] == [[str(n), "3", str(n), "3", "127.0.0.1"] for n in range(3)]
    assert len({rank[8] for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exit 3", 3, "paceline: rank 1 ended with exit code 3"),
        ("kill -9 $$", 137, "paceline: rank 1 was killed by SIGKILL (out of memory?)"),
    ],
)
def test_the_rank_that_failed_is_named_and_its_peers_end(how, code, message, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.local.GRACE_S", 0.1)
    said = []
    work = f"[ $RANK = 1 ] && {how}; echo $$ > {shlex.quote(str(tmp_path))}/pid$RANK; sleep {LONG_S}"
    assert run_command_ranks(shell(work), 3, log=said.append) == code
    assert said == [message]
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("pid*"))


def test_ranks_are_started_again_as_often_as_allowed(tmp_path):
    said = []
    work = f"echo $RANK >> {shlex.quote(str(tmp_path))}/$RANK; [ $(wc -l < {shlex.quote(str(tmp_path))}/$RANK) = 3 ]"
    assert run_command_ranks(shell(work), 1, restarts=1, log=said.append) == 1
    assert said == [
        "paceline: rank 0 ended with exit code 1; restart 1 of 1",
        "paceline: rank 0 ended with exit code 1",
    ]
    assert run_command_ranks(shell(work), 1, restarts=5, log=said.append) == 0
    assert len(said) == 2


@pytest.fixture
def job(tmp_path):
    """A launcher with two ranks, each with a child of its own, that work until they are stopped."""
    started = []

    def start(on_signal):
        traps = " ".join(f"trap '{action}' {name};" for name, action in on_signal.items())
        work = (
            f"{traps} cd {shlex.quote(str(tmp_path))}; sleep {LONG_S} & echo $$ $! > new$RANK; mv new$RANK pid$RANK; "
        )
        launcher = paceline("launch", "--ranks", 2, "--", *shell(work + "while :; do wait; done"))
        started.append(launcher)
        files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        assert wait_until(lambda: all(file.exists() for file in files), launcher)
        return launcher, [int(pid) for file in files for pid in file.read_text().split()]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def test_a_signal_is_passed_on_as_it_is_and_what_the_ranks_make_of_it_counts(job, tmp_path):
    launcher, pids = job({"USR1": "touch warned$RANK", "TERM": "touch saved$RANK; exit 0"})
    launcher.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: len(list(tmp_path.glob("warned*"))) == 2, launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate(timeout=QUICK_S) == ("", "")
    assert launcher.returncode == 0
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert wait_until(lambda: not any(map(alive, pids)))


def test_ctrl_c_stops_and_a_second_one_kills(job, tmp_path):
    launcher, pids = job({"INT": "touch heard$RANK"})
    launcher.send_signal(signal.SIGINT)
    assert wait_until(lambda: len(list(tmp_path.glob("heard*"))) == 2, launcher)
    assert launcher.poll() is None
    # The second counts as one when it comes late enough to be no echo of the first.
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1.1 * SECOND_INTERRUPT_S)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=QUICK_S)
    assert (launcher.returncode, out, err) == (137, "", "paceline: killed by the second Ctrl-C\n")
    assert not any(map(alive, pids))


def test_ranks_and_what_they_started_outlive_no_launcher(job):
    launcher, pids = job({})
    os.kill(launcher.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(alive, pids)))


def test_under_another_launcher_the_process_becomes_the_command():
    code = f"import json, os; print(json.dumps([os.getpid()] + [os.environ[name] for name in {VARIABLES}]))"
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    slurm |= {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    process = paceline("launch", "--ranks", 4, "--", sys.executable, "-S", "-c", code, **slurm, MASTER_PORT="2345")
    out, err = process.communicate(timeout=QUICK_S)
    assert json.loads(out) == [process.pid, "3", "4", "1", "2", "n1", "2345"], err


def test_the_command_line_takes_what_users_of_other_launchers_type(tmp_path):
    assert answers("launch", "-np", 1, "echo", "-n", "--lr", "1", "--", "x") == (0, "--lr 1 -- x", "")
    code, out, err = answers("launch", "--ranks", 2, "--", *shell("exit $RANK"))
    assert (code, out, err) == (1, "", "paceline: rank 1 ended with exit code 1\n")
    place = dict.fromkeys(VARIABLES, "1") | {"RANK": "0", "LOCAL_RANK": "0"}
    code, out, err = answers("launch", "-n", 2, "--", "true", **place)
    assert (code, out) == (2, "")
    assert err.startswith("paceline: --ranks: torchrun")
