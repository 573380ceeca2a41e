"""Commands: how they are started on a number of ranks, and which are refused."""

import sys

import pytest

from paceline.errors import UserError
from paceline.measurement.scripts.command import MeasuredCommand, check_command


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
    with pytest.raises(UserError) as refused:
        check_command(given.split(), [1, 2], {})
    assert (refused.value.code, refused.value.key) == ("conflict", "--ranks")
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
    with pytest.raises(UserError) as error:
        check_command(words, [1, 2], environ)
    assert error.value.code == code
