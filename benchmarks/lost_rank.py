"""How long a run of four ranks stands still when one of them is lost: until the next step on those that are left.

    python benchmarks/lost_rank.py [--launchers paceline torchrun]    # about a minute, on an idle machine

Under torchrun each rank has its own agent, and both are killed. Exits with 1 where it takes more than ten seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline import load, train
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

MOST_S = 10.0
WORKLOAD = Path(__file__).with_name("lost_to_kills.py")
SETTINGS = {"steps": 150, "global_batch": 64, "checkpoint_every": 10, "lr": 0.05}
MEET = "last_call_timeout=2,keep_alive_interval=1"
AGENT = f"torch.distributed.run --nnodes=2:4 --nproc-per-node=1 --max-restarts=3 --rdzv-conf {MEET} --rdzv-id=1"


def start(launcher: str, file: Path) -> list[subprocess.Popen[bytes]]:
    words = ["paceline", "train", str(file), "--resume-or-start", "--quiet", "--out", str(file.parent)]
    if launcher == "paceline":
        return [subprocess.Popen([sys.executable, "-m", *words])]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29788", "--local-addr=localhost", "-m"]
    command = [sys.executable, "-m", *AGENT.split(), *meeting, *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # agents may be late
    return [subprocess.Popen(command, env=environ) for _ in range(4)]


def stand_still(launcher: str, folder: Path) -> tuple[float, list[int]]:
    """Return the seconds from the kill to the next step, and the ranks of each attempt."""
    folder.mkdir()
    file, run = folder / "run.yaml", RunDir(folder / "run")
    settings = "\n  ".join(f"{name}: {value}" for name, value in SETTINGS.items())
    text = f"name: run\nworkload: {WORKLOAD}:Waiting\ntrain:\n  {settings}\nparallel: {{ranks: 2..4, threads: 1}}\n"
    file.write_text(text)
    started = start(launcher, file)

    def find(kind: str, rank: int = 0) -> list[dict]:
        return list(read_events(run.events_file(rank), kind)) if run.events_file(rank).exists() else []

    while len(find("step")) < 25:
        time.sleep(0.1)
    lost = find("start", rank=2)[0]["pid"]
    parent = int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1])
    killed_s = time.time()
    for process in [lost, *([parent] if launcher == "torchrun" else [])]:
        os.kill(process, signal.SIGKILL)
    for process in started:
        process.wait()
    again_s = find("start")[1]["t"]
    first_s = next(event["t"] for event in find("step") if event["t"] > again_s)
    same = train(load(file, {"parallel.ranks": 1, "parallel.least_ranks": None}), folder / "alone", show=False)
    apart = abs(find("step")[-1]["loss"] - read_last_loss(same.path))
    assert apart < 1e-5, f"the answer is another one: {apart}"
    return first_s - killed_s, [event["ranks"] for event in find("start")]


def read_last_loss(folder: Path) -> float:
    return list(read_events(RunDir(folder).events_file(0), "step"))[-1]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", nargs="+", choices=["paceline", "torchrun"], default=["paceline", "torchrun"])
    asked = parser.parse_args()
    within = True
    with tempfile.TemporaryDirectory() as folder:
        for launcher in asked.launchers:
            seconds, ranks = stand_still(launcher, Path(folder) / launcher)
            print(f"{launcher:9} {seconds:5.1f} s without work; ranks {' then '.join(map(str, ranks))}", flush=True)
            within &= seconds <= MOST_S
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
