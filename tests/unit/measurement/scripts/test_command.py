"""Commands: how they are started on a number of ranks, which are refused, and what a failed one said."""

import sys

import pytest

from paceline.measurement.scripts.command import MeasuredCommand, check_command
from paceline.measurement.scripts.measure_command import explain_missing_device, extract_error_lines, quote_output
from results import expect_error


def test_our_launcher_starts_what_does_not_start_itself():
    command = MeasuredCommand(("python", "train.py", "--lr", "0.1"))
    assert command.on(2) == [sys.executable, "-m", "paceline", "launch", "--ranks", "2", "--", *command.words]
    assert command.name == "train"


@pytest.mark.parametrize("words", [["torchrun", "--nproc-per-node={ranks}", "train.py"], ["sh", "start.sh", "{ranks}"]])
def test_a_command_with_ranks_in_it_starts_them_itself(words):
    assert MeasuredCommand(tuple(words)).on(4) == [word.replace("{ranks}", "4") for word in words]


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ("torchrun --nproc_per_node=8 train.py", "--nproc-per-node {ranks}"),
        ("python -m torch.distributed.run --nproc-per-node 2 a.py", "--nproc-per-node {ranks}"),
        ("accelerate launch a.py", "--num_processes {ranks}"),
        ("mpirun -np 2 python a.py", "-n {ranks}"),
    ],
)
def test_a_launcher_with_its_own_number_is_told_what_to_type(given, typed, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: name)
    with expect_error("conflict", "--ranks") as refused:
        check_command(given.split(), [1, 2], {})
    assert str(refused.value).endswith(typed)
    assert check_command(given.split(), [2], {}).starts_its_ranks


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("words", "environ", "code"),
    [
        ([], {}, "missing-value"),
        (["train.py"], {}, "not-found"),
        (["no-such-program"], {}, "not-found"),
        ([sys.executable, "train.py"], {**LAUNCHED, "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "not-supported"),
    ],
)
def test_what_cannot_be_started_is_said(words, environ, code):
    with expect_error(code):
        check_command(words, [1, 2], environ)


OUTPUT = """[rank1]: Traceback (most recent call last):
[rank1]: ValueError: sample 17 is empty
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2374
paceline: rank 1 ended with exit code 1
"""


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path):
    file = tmp_path / "output.txt"
    file.write_text(OUTPUT)
    assert extract_error_lines(file)[-1] == "[rank1]: ValueError: sample 17 is empty"
    file.write_text("\n".join(OUTPUT.splitlines()[2:]))
    assert extract_error_lines(file)[-1].startswith("[rank0]: RuntimeError")
    file.write_text("python: can't open file 'trian.py'\npaceline: rank 0 ended with exit code 2\n")
    assert extract_error_lines(file) == ["python: can't open file 'trian.py'"]
    file.write_text("")
    assert extract_error_lines(file) == ["it printed nothing"]


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("RuntimeError: Distributed package doesn't have NCCL built in", True),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", True),
        ("RuntimeError: CUDA error: invalid device ordinal", True),
        ("AssertionError: Torch not compiled with CUDA enabled", True),
        ("RuntimeError: Found no NVIDIA driver on your system.", True),
        ("ValueError: sample 17 is empty", False),
    ],
)
def test_a_script_that_wants_a_device_is_told_how_to_try_it_without(line, missing):
    told = explain_missing_device(["Traceback (most recent call last):", line])
    assert bool(told) == missing
    assert not missing or "init_process_group('gloo')" in told


def test_the_last_line_and_the_log_are_named(tmp_path):
    (tmp_path / "output.txt").write_text("starting\nUsage: train.py --data FOLDER\n")
    assert quote_output(tmp_path) == f"its last line: Usage: train.py --data FOLDER; see {tmp_path / 'output.txt'}"
