"""1,000 random faults in running trainings: no work is lost, no weight is another, nothing hangs, nothing is left.

A run is struck, goes on by the same command, is struck again, and so on; at last it is left in peace, and must have
found what a run finds that nothing happened to.

FAULTS=1000 make test-soak                               all of them
FAULTS=100 FIRST=300 pytest tests/soak/test_faults.py    those from number 300 on
TALLY=FILE pytest -n 2 …                                 two at a time; each fault is added to the file, and
python tests/soak/chain.py FILE                          prints the table of all of them
"""

import json
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
from chain import Chain, Disk, tallied
from faults import LATE, NEVER, PHASES, RUNS, files, small_disk

COUNT, FIRST = int(os.environ.get("FAULTS", "1000")), int(os.environ.get("FIRST", "0"))
EACH = 10
"""Faults of one test."""
SIZE = "48m"
STEPS = ("step",) * 3
"""Drawn more often than other phases: most of the time of a run is in them."""


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    with small_disk(folder, SIZE) as mounted:
        files(folder)
        yield Disk(folder, mounted, tmp_path_factory.mktemp("log") / "log.txt")


@pytest.fixture(scope="session")
def tally(tmp_path_factory):
    """A line for every fault, kept over invocations where a file is named; at the end the table."""
    file = Path(os.environ.get("TALLY", tmp_path_factory.mktemp("tally") / "faults.jsonl"))
    yield file
    print(f"\n{tallied(file)}")


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, EACH))
def test_runs_survive(first, disk, tally, tmp_path):
    dice, struck = random.Random(first), []
    with closing(Chain(disk, tmp_path / "log.txt", dice)) as chain:
        while len(struck) < EACH:
            if chain.finished:
                resumed = chain.in_peace()
                if struck:  # the first run of a chain may end before it is struck
                    struck[-1]["resumed"] += resumed
                chain.begin(dice.choice(list(RUNS)))
            phases = (*PHASES, *STEPS) if chain.history else (*LATE, *STEPS)
            phase = dice.choice([one for one in phases if (chain.name, one) not in NEVER])
            struck += filter(None, [chain.strike(phase, dice.choice(disk.faults))])
        struck[-1]["resumed"] += chain.in_peace()
    with tally.open("a") as file:
        file.writelines(f"{json.dumps({'first': first, **fault})}\n" for fault in struck)
