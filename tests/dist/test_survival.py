"""A run that is struck three times in a row ends with the same weights. tests/soak tries a thousand faults."""

import random
from contextlib import closing

import pytest
from chain import Chain, Disk
from faults import files, small_disk


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, "48m") as mounted:
        files(folder)
        yield Disk(folder, mounted, tmp_path / "log.txt")


def test_a_run_survives(disk, tmp_path):
    full = "disk full" if "disk full" in disk.faults else "folder away"
    with closing(Chain(disk, tmp_path / "log.txt", random.Random(1), "own")) as chain:
        assert chain.strike("start", "SIGKILL launcher")
        chain.strike("checkpoint", full)  # which it may have passed by the time that we look
        chain.strike("step", "SIGKILL worker")
        chain.in_peace()
