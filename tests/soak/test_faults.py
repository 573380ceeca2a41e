"""1,000 random faults in running trainings: no work is lost, no weight is another, nothing hangs, nothing is left.

FAULTS=1000 make test-soak                              all of them
FAULTS=100 FIRST=300 pytest tests/soak/test_faults.py   those from number 300 on
"""

import collections
import functools
import os
import random
import shutil
import subprocess
import time

import pytest
from faults import (
    FAULTS,
    GRACE_S,
    PATIENCE_S,
    PHASES,
    RUNS,
    TIMEOUT_S,
    begin,
    bring_back,
    files,
    leftovers,
    orphans,
    reached,
    until_ended,
    weights,
)

from paceline.record.events import Status
from paceline.record.run_dir import RunDir
from paceline.record.summary import read_summary

COUNT, FIRST = int(os.environ.get("FAULTS", "1000")), int(os.environ.get("FIRST", "0"))
DISK = "48m"
TABLE: collections.Counter[tuple[str, str]] = collections.Counter()


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    """A small disk of its own, which can be filled; a plain folder where nobody may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=False).returncode == 0
    )
    yield folder, mounted
    if mounted:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.fixture(scope="session")
def reference(disk):
    """What the runs find when nothing happens to them."""
    folder, _ = disk
    files(folder)

    @functools.cache
    def found(name):
        attempt = begin([f"{name}.yaml", "--out", "reference"], folder, folder / "log.txt")
        assert until_ended(attempt, PATIENCE_S) == 0, (folder / "log.txt").read_text()[-3000:]
        return weights(RunDir(folder / "reference" / name))

    yield found
    print("\n" + table())


def table() -> str:
    """How often each fault struck in each phase."""
    lines = [f"{'':18}" + "".join(f"{phase:>12}" for phase in PHASES)]
    lines += [f"{fault:18}" + "".join(f"{TABLE[phase, fault]:>12}" for phase in PHASES) for fault in FAULTS]
    return "\n".join([*lines, f"{sum(TABLE.values())} faults"])


@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_a_run_survives(number, disk, reference):
    (folder, mounted), dice = disk, random.Random(number)
    name, phase = dice.choice(list(RUNS)), dice.choice(PHASES)
    fault = dice.choice([one for one in FAULTS if mounted or one != "disk full"])
    what, log, out = f"{name}, {fault} at {phase}", folder / "log.txt", folder / "runs"
    expected = reference(name)
    shutil.rmtree(out, ignore_errors=True)
    if phase == "data":
        shutil.rmtree(folder / "cache", ignore_errors=True)
    log.write_text("")
    run = RunDir(out / name)
    jumps = f"{dice.randrange(40)} {dice.choice((-1, 1)) * 86400}" if fault == "clock jumps" else ""
    attempt = begin([f"{name}.yaml", "--out", "runs"], folder, log, jumps)
    end = time.monotonic() + PATIENCE_S
    while not reached(phase, run) and attempt.process.poll() is None and time.monotonic() < end:
        attempt.tree()
        time.sleep(0.002)
    time.sleep(dice.random() * (1.5 if phase in ("start", "data") else 0.02))
    attempt.tree()
    FAULTS[fault](attempt, run, dice)
    TABLE[phase, fault] += 1
    code = until_ended(attempt, PATIENCE_S if fault != "frozen rank" else TIMEOUT_S + GRACE_S + PATIENCE_S)
    assert code is not None, f"{what}: it hangs\n{log.read_text()[-2000:]}"
    (folder / "filler").unlink(missing_ok=True)
    bring_back(run)
    assert orphans(attempt) == [], what
    for _ in range(3):
        if run.summary_file.is_file() and read_summary(run.summary_file).status == Status.FINISHED:
            break
        words = ["--resume", str(run.path)] if run.spec_file.is_file() else [f"{name}.yaml", "--out", "runs"]
        if not run.spec_file.is_file():
            shutil.rmtree(out, ignore_errors=True)
        again = begin(words, folder, log)
        assert until_ended(again, PATIENCE_S) == 0, f"{what}: it does not go on\n{log.read_text()[-2000:]}"
        assert orphans(again) == [], what
    assert weights(run) == expected, f"{what}: other weights"
    assert leftovers(folder) == [], what
    assert "Traceback" not in log.read_text(), f"{what}\n{log.read_text()[-3000:]}"
