"""Thirty faults, ten in a run, one after the other: nothing is lost, and the answer is that of an undisturbed run."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import differ, paceline_says, step, submitted, undisturbed, until_ended, weights
from slurm_lab import Lab, until

from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

STEPS = 2000
PROGRESS = 10
"""Steps between two faults, at least."""


@dataclass
class Campaign:
    lab: Lab
    run: Path
    job: str

    @property
    def starts(self) -> int:
        return sum(1 for _ in read_events(RunDir(self.run).events_file(0), "start"))

    def step(self) -> int:
        return step(self.run)

    def redone(self) -> int:
        """Steps that the last attempt makes which one before it had made already."""
        reached, newest, begins = 0, 0, 0
        for event in read_events(RunDir(self.run).events_file(0)):
            if event["kind"] == "start":
                reached, begins = max(reached, newest), 0
            elif event["kind"] == "resume":
                begins = event["step"]
            elif event["kind"] == "step":
                newest = event["step"]
        return reached - begins

    def goes_on(self) -> bool:
        self.lab.hurry(self.job)
        return self.lab.state(self.job) == "RUNNING"

    def go_further(self) -> None:
        reached = self.step()
        until("steps are made", lambda: self.goes_on() and self.step() >= reached + PROGRESS, 180)

    def crash_node(self, node: str) -> None:
        self.lab.crash(node)
        until("the crash is noticed", lambda: self.lab.state(self.job) != "RUNNING", 120)
        self.lab.start_node(node)

    def kill_slurmd(self) -> None:
        self.lab.kill_slurmd("n1")
        time.sleep(1)
        self.lab.start_node("n1")

    def kill_slurmctld(self) -> None:
        self.lab.kill_controller()
        time.sleep(1)
        self.lab.start_controller()

    def fill_disk(self) -> None:
        before, filler = self.starts, self.lab.shared / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True, check=False)
        until("the run notices", lambda: self.lab.state(self.job) != "RUNNING" or self.starts > before, 180)
        filler.unlink()

    def cancel(self) -> None:
        paceline_says("cancel", str(self.run))
        until("the job is over", lambda: not self.lab.ask("squeue", "-h", "-j", self.job).strip(), 120)
        self.job = submitted(str(self.run), "--nodes", "2", "--time", "60m")


HIGH = ("sbatch", "-p", "high", "-N2", "--exclusive", "-o/dev/null", "--wrap", "sleep 1")
FAULTS: dict[str, Callable[[Campaign], object]] = {
    "kill rank": lambda campaign: os.kill(campaign.lab.ranks("n2")[0], signal.SIGKILL),
    "requeue": lambda campaign: campaign.lab.ask("scontrol", "requeue", campaign.job),
    "pre-empt": lambda campaign: campaign.lab.ask(*HIGH),
    "warn": lambda campaign: campaign.lab.ask("scancel", "--batch", "--signal=USR1", campaign.job),
    "crash node": lambda campaign: campaign.crash_node("n2"),
    "kill slurmd": Campaign.kill_slurmd,
    "stop rank": lambda campaign: os.kill(campaign.lab.ranks("n1")[0], signal.SIGTERM),
    "fill disk": Campaign.fill_disk,
    "kill slurmctld": Campaign.kill_slurmctld,
    "cancel": Campaign.cancel,
    "crash first node": lambda campaign: campaign.crash_node("n1"),
}
TEN = list(FAULTS)[:10]
ROUNDS = {
    "in order": TEN,
    "backwards": TEN[::-1],
    "with the first node": [name.replace("crash", "crash first") for name in TEN],
}


@pytest.mark.parametrize("faults", ROUNDS.values(), ids=ROUNDS)
def test_ten_faults_lose_nothing(lab, run_file, faults):
    file = run_file(steps=STEPS, step_s=0.2)
    words = (f"data.until={Path('enough').resolve()}", "--nodes", "2", "--time", "60m", "--out", str(lab.shared))
    campaign = Campaign(lab, lab.shared / "line", submitted(str(file), *words))
    print(f"{'fault':20} {'at step':>8} {'redone':>8} {'back after':>11}")
    campaign.go_further()
    for fault in faults:
        at, starts, began = campaign.step(), campaign.starts, time.monotonic()
        assert at < STEPS, "the run was over before all faults"
        FAULTS[fault](campaign)
        again = not fault.startswith("kill slurm")  # the run goes on without it
        if again:
            until("it starts again", lambda: campaign.goes_on() and campaign.starts > starts, 240)  # noqa: B023
        back_s = time.monotonic() - began
        campaign.go_further()
        print(f"{fault:20} {at:8} {campaign.redone() if again else 0:8} {back_s:9.1f} s", flush=True)
    Path("enough").touch()
    assert until_ended(lab, campaign.job, 300) == "COMPLETED"
    assert differ(weights(campaign.run), undisturbed(run_file(steps=STEPS), 2)) == 0
    shutil.rmtree(campaign.run)
