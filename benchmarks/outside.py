"""Scripts measured from outside, held against their own clocks and against torch's profiler.

    python benchmarks/outside.py [--scripts ddp accelerate lightning] [--ranks 1 2] [--steps 60] [--turns 200]

Each script runs on so many ranks of one core each. Printed are the step as it was seen from outside over the script's
own clock in the same run, and what a step takes while it is measured over the same when it is not, in pairs of turns
within one training: by the script's clock, the middle of the pairs, and by the time of the processor, which other work
on the machine disturbs less, their mean. Then, on two ranks with a slow network between them (root is needed, see
slow_network.py), the exposed communication that was seen from outside beside that of the profiler, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from slow_network import ADDRESSES, CARD, Link, slow_link, why_not

from paceline.launch.local import reserve_port
from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.measure_command import read_script_times
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

SCRIPT = Path(__file__).with_name("outside_script.py")
SCRIPTS = ("ddp", "accelerate", "lightning")
WARM_UP = 5
NEVER = 1 << 30
"""Steps after which a script would be ended: it is left to print what its own clock said."""


def run(kind: str, ranks: int, steps: int, folder: Path, link: Link | None = None, turns: int = 0) -> list[Any]:
    """What each rank printed. With a link, each has a namespace of its own and works under the profiler."""
    words = [
        sys.executable,
        str(SCRIPT),
        kind,
        "--steps",
        str(steps),
        "--turns",
        str(turns),
        *(["--profile"] if link else []),
    ]
    cores = sorted(os.sched_getaffinity(0))
    request = RecordRequest(str(folder), NEVER, ranks)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with reserve_port() as port:
        environ |= {"MASTER_ADDR": ADDRESSES[0] if link else "127.0.0.1", "MASTER_PORT": str(port)}
        environ |= {"GLOO_SOCKET_IFNAME": CARD if link else "lo"}
        started = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            started.append(
                subprocess.Popen(
                    [*(("ip", "netns", "exec", link.names[rank]) if link else ()), *words],
                    env=request.environ(environ | place),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=partial(os.sched_setaffinity, 0, {cores[rank % len(cores)]}),
                )
            )
        printed = [process.communicate(timeout=900)[0].decode() for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{kind} failed on {ranks} ranks; try  {' '.join(words)}")
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]


def usual(of_steps: list[float]) -> float:
    return statistics.median(of_steps[WARM_UP:])


def clocks(kind: str, ranks: int, steps: int, turns: int) -> tuple[float, float, str, str]:
    """(usual step, seen from outside over the script's clock, measured over not: by the clock and by the processor)."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(kind, ranks, steps, Path(folder), turns=2 * turns)[0]
        events = read_steps(RunDir(Path(folder)).events_file(0))
    seen = usual([event["step_s"] / own for event, own in zip(events, found["step_s"], strict=False)])
    taken = {on: [turn[1:] for turn in found["turns"] if turn[0] == on] for on in (True, False)}
    by_clock, of_processor = (
        [sum(own[which]) / sum(alone[which]) for own, alone in zip(taken[True], taken[False], strict=True)]
        for which in (0, 1)
    )
    return usual(found["step_s"]), seen, middle(by_clock), mean(of_processor)


def middle(ratios: list[float]) -> str:
    """The median, and its standard error for normal ratios."""
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.median(ratios):.4f} ± {error:.4f}"


def mean(ratios: list[float]) -> str:
    """The geometric one: the mean of ratios of noisy times is too large."""
    return f"{statistics.geometric_mean(ratios):.4f} ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.4f}"


def exposed(kind: str, steps: int, link: Link) -> tuple[float, float, float]:
    """(usual step, exposed as it was seen from outside, the same by the profiler), means over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run(kind, 2, steps, Path(folder), link)
        times = read_script_times(Path(folder), RecordRequest(folder, NEVER, 2), 0)
        events = [read_steps(RunDir(Path(folder)).events_file(rank)) for rank in range(2)]
    ours = statistics.fmean(usual([event["exposed_s"] for event in of_rank]) for of_rank in events)
    theirs = statistics.fmean(usual(rank["exposed_s"]) for rank in printed)
    return times.step_s, ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rate", default="100mbit")
    asked = parser.parse_args()
    columns = f"{'outside / own clock':>20} {'measured / not':>16} {'of processor':>16}"
    print(f"{'script':>10} {'ranks':>5} {'step':>9} {columns}", flush=True)
    for kind in asked.scripts if asked.turns else ():
        for ranks in asked.ranks:
            step_s, seen, cost, processor = clocks(kind, ranks, asked.steps, asked.turns)
            ratios = f"{seen:>20.4f} {cost:>16} {processor:>16}"
            print(f"{kind:>10} {ranks:>5} {1e3 * step_s:>6.1f} ms {ratios}", flush=True)
    if reason := why_not():
        raise SystemExit(f"no slow network here: {reason}")
    print(f"{'script':>10} {'link':>8} {'step':>9} {'exposed, outside':>17} {'profiler':>9} {'ratio':>6}", flush=True)
    with slow_link() as link:
        link.shape(asked.rate)
        for kind in asked.scripts:
            step_s, ours, theirs = exposed(kind, max(20, asked.steps // 3), link)
            row = f"{1e3 * step_s:>6.1f} ms {1e3 * ours:>14.1f} ms {1e3 * theirs:>6.1f} ms {ours / theirs:>6.3f}"
            print(f"{kind:>10} {asked.rate:>8} {row}", flush=True)


if __name__ == "__main__":
    main()
