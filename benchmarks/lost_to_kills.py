"""Does a run that is killed again and again lose the time that the plan says?

    python benchmarks/lost_to_kills.py              # four runs at once, 3 to 8 kills each; eight minutes
    python benchmarks/lost_to_kills.py --kills 40

A run whose steps mostly wait is trained on two ranks with `--resume-or-start`, killed (SIGKILL, all of its processes)
after times drawn from an exponential distribution, and started again at once, until it has finished. The plan gets the
rate of the kills and the mean time from a kill to the next new step, over every other kill.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline import Workload
from paceline.hardware.failures import FailureModel, expect_run
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

STEP_S, EVERY = 0.2, 25
MTBF_S = 60.0  # of the whole run
LEARNED = 1  # kills of each run before it is judged


class Waiting(Workload):
    """A line through points, whose steps take their time without a core."""

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, split):
        x = torch.linspace(0, 1, 64)[:, None]
        return (x, 2 * x) if split == "train" else None

    def loss(self, model, batch):
        time.sleep(STEP_S)
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(y)


@dataclass
class Played:
    """What one run took: between its first new step after the kills that were learned from, and its end."""

    work_s: float = 0.0
    wall_s: float = 0.0
    kills: int = 0
    restarts_s: list[float] = field(default_factory=list)
    step_s: float = 0.0


def last_step(folder: Path) -> tuple[int, float]:
    """Return the newest step on record and when it ended."""
    file = RunDir(folder).events_file(0)
    steps = list(read_events(file, "step")) if file.exists() else []
    return (steps[-1]["step"], steps[-1]["t"]) if steps else (0, 0.0)


def play_run(folder: Path, kills: int, seed: int) -> Played:
    rng = random.Random(seed)
    gaps = [-MTBF_S * math.log(1 - (k + rng.random()) / kills) for k in range(kills)]  # one of each kth part
    rng.shuffle(gaps)
    steps = int(kills * MTBF_S * 0.45 / STEP_S)
    words = [f"train.steps={steps}", f"train.checkpoint_every={EVERY}", "parallel.ranks=2", "train.global_batch=64"]
    folder.mkdir()
    file = folder.with_suffix(".yaml")
    file.write_text(f"name: waiting\nworkload: {Path(__file__).resolve()}:Waiting\n")
    command = [sys.executable, "-m", "paceline", "train", str(file), *words, "--out", str(folder), "--resume-or-start"]
    found, judged_from, done_before, killed_at = Played(), 0.0, 0, 0.0
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    while True:
        began = time.time()
        process = subprocess.Popen(
            command, env=environ, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        run = next(folder.iterdir(), None)
        new = None
        kill_at = began + (gaps.pop() if gaps else math.inf)  # restarts may be killed too
        while process.poll() is None and time.time() < kill_at:
            time.sleep(0.05)
            run = run or next(folder.iterdir(), None)
            if new is None and run is not None:
                step, ended = last_step(run)
                if ended > began:
                    new = ended - STEP_S
                    if found.kills >= LEARNED and not judged_from:
                        judged_from, done_before = new, step
                    if found.kills:
                        found.restarts_s.append(new - killed_at)
        if process.poll() is not None:
            assert process.returncode == 0, f"the run ended with {process.returncode}"
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed_at = time.time()
        found.kills += 1
    assert run is not None
    kept = {event["step"]: event["step_s"] for event in read_events(RunDir(run).events_file(0), "step")}
    found.step_s = statistics.median(kept.values())
    _, ended = last_step(run)
    found.wall_s, found.work_s = ended - judged_from, sum(s for step, s in kept.items() if step > done_before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=14, help="at most, of each run")
    parser.add_argument("--runs", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.runs) as pool:
        found = list(pool.map(lambda k: play_run(Path(folder) / str(k), asked.kills, k), range(asked.runs)))
    learned = statistics.fmean(s for run in found for s in run.restarts_s[::2])
    lost_s = planned_s = 0.0
    for run in found:
        kills = run.kills - LEARNED
        rate = kills / run.wall_s
        model = FailureModel(1 / rate / 3600, learned, "injected")
        expected = expect_run(model, 1, run.work_s, 1e-3, EVERY * run.step_s)
        lost, planned = run.wall_s - run.work_s, 3600 * expected.hours - run.work_s
        lost_s, planned_s = lost_s + lost, planned_s + planned
        print(
            f"{kills} kills: {run.work_s:.0f} s of work took {run.wall_s:.0f} s; planned {3600 * expected.hours:.0f} s"
        )
    print(f"restart {learned:.2f} s (the mean of every other one)")
    print(f"lost {lost_s:.0f} s, planned {planned_s:.0f} s: {lost_s / planned_s - 1:+.0%}")


if __name__ == "__main__":
    main()
