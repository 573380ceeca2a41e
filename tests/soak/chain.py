"""A run that is struck again and again, and what must hold each time; in the end it is left in peace."""

import collections
import functools
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faults
from commands import Command, start_command

from paceline.launch.heartbeat import read_beats
from paceline.runlog.events import RunStatus, read_events
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary

REFUSED, BUG = 2, 70
FORKED = 0.9
"""Share of attempts that begin without a new interpreter, at a third of the cost."""
TRACEBACK = re.compile(r"^Traceback .*\n(?:  .*\n)*", re.MULTILINE)
LONG_S = 60 * faults.SLOW
"""parallel.timeout_s of a run that nobody freezes."""


class Disk:
    """Where the runs are, and what they find when nothing happens to them."""

    def __init__(self, folder: Path, mounted: bool, log: Path) -> None:
        self.folder, self.log = folder, log
        self.faults = [fault for fault in faults.FAULTS if mounted or fault not in faults.MOUNTING]

    @functools.cache  # noqa: B019 - there is one
    def expected(self, name: str) -> str:
        command = start_command(["train", f"{name}.yaml", "--out", "reference", "--quiet"], self.folder, self.log)
        assert faults.until_ended(command, faults.PATIENCE_S) == 0, self.log.read_text()[-3000:]
        return faults.weights(RunDir(self.folder / "reference" / name))


class Chain:
    """Each attempt is struck by a fault, and the next goes on by the same command."""

    def __init__(self, disk: Disk, log: Path, dice: random.Random, name: str = "") -> None:
        self.disk, self.log, self.dice = disk, log, dice
        log.touch()
        self.begin(name or dice.choice(list(faults.RUNS)))

    def begin(self, name: str) -> None:
        self.name, self.expected = name, self.disk.expected(name)
        self.run = RunDir(self.disk.folder / "runs" / name)
        shutil.rmtree(self.run.path.parent, ignore_errors=True)
        self.run.path.parent.mkdir()
        self.history: list[str] = []
        self.resumed = 0

    def list_resumes(self) -> list[int]:
        """The steps at which attempts since the last call were resumed."""
        steps = [event["step"] for event in read_events(self.run.events_file(0), "resume")]
        new, self.resumed = steps[self.resumed :], len(steps)
        return new

    def start(self, jumps: str = "", timeout_s: float = LONG_S) -> Command:
        words = f"train {self.name}.yaml --out runs --resume-or-start --quiet parallel.timeout_s={timeout_s}"
        self.forked = self.dice.random() < FORKED
        self.command = start_command(words.split(), self.disk.folder, self.log, jumps, self.forked)
        return self.command

    def strike(self, phase: str, fault: str) -> dict[str, Any] | None:
        """One fault, and what must hold once the command has ended; None where it had ended before."""
        self.history.append(f"{fault} at {phase}")
        at = self._reached(phase, fault)
        if at.command.code is not None:
            assert at.command.code == 0, self.told("it ended by itself")
            return None
        in_step = any(beat.phase in ("data", "step") for beat in read_beats(self.run.heartbeats) if beat.state)
        began = time.monotonic()
        frozen = faults.FAULTS[fault](at)
        code = faults.until_ended(at.command, faults.TIMEOUT_S + faults.GRACE_S if frozen else faults.PATIENCE_S)
        ended_s = time.monotonic() - began
        assert code is not None, self.told("it hangs")
        assert code != BUG, self.told("a bug")
        assert code != REFUSED or fault in faults.MOUNTING, self.told("refused")
        assert not frozen or code == 0 or f"pid {frozen}" in self.log.read_text(), self.told(f"{frozen} is not named")
        faults.mend(self.run, self.disk.folder)
        assert faults.orphans(at.command) == [], self.told("orphans")
        struck = {"phase": phase, "fault": fault, "run": self.name}
        where = {"in_step": in_step, "forked": self.forked, "resumed": self.list_resumes()}
        return {**struck, **where, "frozen": bool(frozen), "ended_s": round(ended_s, 2)}

    def _reached(self, phase: str, fault: str) -> faults.Struck:
        """An attempt, at the moment when it is to be struck."""
        if phase == "data":  # which are prepared again
            shutil.rmtree(self.disk.folder / "cache", ignore_errors=True)
        before = {beat.pid for beat in read_beats(self.run.heartbeats)}
        jumps = f"{self.dice.randrange(40)} {self.dice.choice((-1, 1)) * 86400}" if fault == "clock jumps" else ""
        command = self.start(jumps, faults.TIMEOUT_S if fault == "frozen" else LONG_S)
        at = faults.Struck(command, self.run, self.disk.folder, self.dice)
        end = time.monotonic() + faults.PATIENCE_S
        while not at.reached(phase, before) and command.code is None and time.monotonic() < end:
            time.sleep(0.003)
        time.sleep(self.dice.random() * faults.SPAN_S.get(phase, 0.01))
        command.tree()
        return at

    @property
    def finished(self) -> bool:
        return self.run.summary_file.is_file() and read_summary(self.run.summary_file).status == RunStatus.FINISHED

    def in_peace(self) -> list[int]:
        """The run goes on to its end, if it is not there already, and has found what it would have found anyway.

        Returns at which step it was resumed, if it was.
        """
        command = self.start()
        assert faults.until_ended(command, faults.PATIENCE_S) == 0, self.told("it does not go on")
        assert faults.orphans(command) == [], self.told("orphans in peace")
        assert self.finished, self.told("not finished")
        assert faults.weights(self.run) == self.expected, self.told("other weights")
        assert faults.leftovers(self.disk.folder) == [], self.told("temporary files")
        assert not any("paceline/" in one for one in TRACEBACK.findall(self.log.read_text())), self.told("a traceback")
        return self.list_resumes()

    def close(self) -> None:
        self.command.kill()
        faults.mend(self.run, self.disk.folder)

    def told(self, what: str) -> str:
        return f"{self.name}: {what} after {', '.join(self.history)}\n{self.log.read_text()[-3000:]}"


def table(struck: Sequence[dict[str, Any]]) -> str:
    """How often each fault struck in each phase, and how long it took the run to end when a process was frozen."""
    counts = collections.Counter((one["fault"], one["phase"]) for one in struck)
    rows = {fault: [counts[fault, phase] for phase in faults.PHASES] for fault in faults.FAULTS}
    lines = [f"{name:18}" + "".join(f"{cell:>12}" for cell in row) for name, row in {"": faults.PHASES, **rows}.items()]
    runs = collections.Counter(one["run"] for one in struck)
    frozen_s = [one["ended_s"] for one in struck if one["frozen"]]
    lines += [f"{len(struck)} faults: " + ", ".join(f"{name} {count}" for name, count in runs.items())]
    resumed = [step for one in struck for step in one["resumed"]]
    above = sum(step > 0 for step in resumed)
    lines.append(f"{sum(one['in_step'] for one in struck)} hit a training step")
    lines.append(f"{sum(not one.get('forked') for one in struck)} hit processes of a new interpreter")
    lines.append(f"{above} of {len(resumed)} resumes began above step 0 ({above / max(1, len(resumed)):.0%})")
    if frozen_s:
        lines.append(f"frozen: ended {max(frozen_s):.1f} s later at most, of {faults.TIMEOUT_S + faults.GRACE_S}")
    return "\n".join(lines)


def tallied(file: Path) -> str:
    return table([json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else [])


if __name__ == "__main__":
    print(tallied(Path(sys.argv[1])))
