"""Commands: how they are started on a number of ranks, which are rejected, and what a failed one said."""

import sys

import pytest

from paceline.measurement.scripts.command import MeasuredCommand, check_command
from paceline.measurement.scripts.measure_command import explain_missing_device, extract_error_lines, quote_output
from results import expect_error


def test_our_launcher_starts_what_does_not_start_itself():
    command = MeasuredCommand(("python", "train.py", "--lr", "0.1"))
    assert command.on(2) == [sys.executable, "-m", "paceline", "launch", "--ranks", "2", "--", *command.words]
    assert command.name == "train"
    itself = MeasuredCommand(("torchrun", "--nproc-per-node={ranks}", "train.py"))
    assert itself.on(4) == ["torchrun", "--nproc-per-node=4", "train.py"]
    assert MeasuredCommand(("sh", "start.sh", "{ranks}")).on(4) == ["sh", "start.sh", "4"]


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ("torchrun --nproc_per_node=8 train.py", "--nproc-per-node {ranks}"),
        ("python -m torch.distributed.run --nproc-per-node 2 a.py", "--nproc-per-node {ranks}"),
        ("accelerate launch a.py", "--num_processes {ranks}"),
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
        ([sys.executable, "train.py"], {**LAUNCHED, "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "not-supported"),
    ],
)
def test_what_cannot_be_started_is_rejected(words, environ, code):
    with expect_error(code):
        check_command(words, [1, 2], environ)


CAUSE = "[rank1]: ValueError: sample 17 is empty"
LOST = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2374"
OURS = "paceline: rank 1 ended with exit code 1"
UNOPENED = "python: can't open file 'trian.py'"


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ([CAUSE, "[rank0]: Traceback (most recent call last):", LOST, OURS], CAUSE),
        ([LOST, OURS], LOST),
        ([UNOPENED, OURS], UNOPENED),
        ([], "it printed nothing"),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_the_cause(lines, last, tmp_path):
    (tmp_path / "output.txt").write_text("\n".join(lines))
    assert extract_error_lines(tmp_path / "output.txt")[-1] == last
    assert f"{last}; see {tmp_path / 'output.txt'}" in quote_output(tmp_path)


def test_a_script_that_wants_a_device_is_told_how_to_try_it_without():
    for line in ("RuntimeError: Distributed package doesn't have NCCL built in", "CUDA error: invalid device ordinal"):
        assert "init_process_group('gloo')" in explain_missing_device(["Traceback (most recent call last):", line])
    assert explain_missing_device([CAUSE]) == ""
