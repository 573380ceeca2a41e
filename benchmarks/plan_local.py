"""Is the plan right on this machine? Predicted and measured speed-up of small runs on 1, 2 and 4 ranks.

    python benchmarks/plan_local.py                 # over the loopback; about two minutes
    sudo python benchmarks/plan_local.py --shaped   # and over links of 1 Gbit/s and 100 Mbit/s
    sudo python benchmarks/plan_local.py --shaped --ranks 1,2
    sudo python benchmarks/plan_local.py --shaped --own   # each run planned as after `paceline calibrate RUN.yaml`

It calibrates first, with one thread per rank, and plans with nothing but that; with `--own` each run's steps are timed
over the loopback too, before the runs that the plan is compared with. Shaped links are made of network
namespaces, one per rank, and need root. The machine should be otherwise idle: whatever else runs takes cores away
between the calibration and the runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.config import RunSpec
from paceline.io.files import write_json
from paceline.measurement.measure import measure
from paceline.measurement.recalibration import update_calibration
from paceline.planner.calibration.calibrate import calibrate_machine
from paceline.planner.plan import plan
from paceline.runlog.events import read_steps

ROOT = Path(__file__).resolve().parents[1]
RANKS = (1, 2, 4)
STEPS = 12
ROUNDS = 2
RUNS = {
    "classifier": ("classifier_docstrings.yaml", ("train.global_batch=64",)),
    "lm": ("lm_tiny.yaml", ("train.global_batch=16",)),
}
LINKS = {"loopback": "", "1 Gbit/s": "1Gb", "100 Mbit/s": "100Mb"}
TIMES = ("train.epochs=null", f"train.steps={STEPS}", "train.log_every=1000", "parallel.threads=1")


@dataclass(frozen=True)
class Line:
    run: str
    link: str
    ranks: int
    measured_s: float
    predicted_s: float
    measured: float
    predicted: float
    load: float
    """Processes that wanted a core in the minute before: more than the ranks are not ours."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def step_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def verdict(self) -> bool:
        """Right where it matters: no word is held against a plan whose run neither gained nor lost a tenth."""
        if 0.9 <= self.measured <= 1.1:
            return True
        return (self.predicted > 1) == (self.measured > 1)


def specs(names: Sequence[str]) -> Iterator[tuple[str, RunSpec]]:
    for name in names:
        file, overrides = RUNS[name]
        if not (ROOT / "recipes" / file).is_file():
            continue
        yield name, paceline.load(ROOT / "recipes" / file, [*overrides, *TIMES])


def steps_s(folder: Path) -> float:
    """The time of a step: the best but one after the first few, which warm up. Other programs only make it longer."""
    found = [event["step_s"] for event in read_steps(next(folder.glob("*/events/rank0.jsonl")))][3:]
    return sorted(found)[1]


def run_here(spec: RunSpec, ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        paceline.train(spec.replace({"parallel.ranks": ranks}), folder, show=False)
        return steps_s(Path(folder))


def run_apart(spec: RunSpec, ranks: int) -> float:
    """Run each rank in its own network namespace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        import yaml

        file.write_text(yaml.safe_dump(spec.replace({"parallel.ranks": ranks}).dump()))
        started = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29533}
            environ = {**os.environ, **{k: str(v) for k, v in place.items()}, "MASTER_ADDR": address(0)}
            environ |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", space(rank), sys.executable, "-m", "paceline", "train", str(file)]
            started.append(subprocess.Popen([*command, "--out", f"{folder}/runs", "--quiet"], env=environ))
        try:
            failed = [process.wait(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(failed):
            raise SystemExit(f"a rank ended with {failed}")
        return steps_s(Path(folder) / "runs")


# ── one network namespace per rank, all on one switch


def space(rank: int) -> str:
    return f"pace{rank}"


def address(rank: int) -> str:
    return f"10.78.0.{10 + rank}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def apart(ranks: int) -> Iterator[None]:
    try:
        ip("netns", "add", "pace-switch")
        ip("-n", "pace-switch", "link", "add", "switch", "type", "bridge")
        ip("-n", "pace-switch", "link", "set", "switch", "up")
        for rank in range(ranks):
            ip("netns", "add", space(rank))
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                space(rank),
                "type",
                "veth",
                "peer",
                f"port{rank}",
                "netns",
                "pace-switch",
            )
            ip("-n", "pace-switch", "link", "set", f"port{rank}", "master", "switch", "up")
            ip("-n", space(rank), "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            ip("-n", space(rank), "link", "set", "eth0", "up")
            ip("-n", space(rank), "link", "set", "lo", "up")
        yield
    finally:
        for name in ("pace-switch", *map(space, range(ranks))):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def shape(ranks: int, rate: str) -> None:
    """Limit what every rank sends and receives."""
    rate = rate.replace("Gb", "gbit").replace("Mb", "mbit")
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    for rank in range(ranks):
        for where, link in ((space(rank), "eth0"), ("pace-switch", f"port{rank}")):
            ip("netns", "exec", where, "tc", "qdisc", "replace", "dev", link, *limit)


# ── the comparison


def calibrate_run(spec: RunSpec, numbers: Sequence[int], calibration: Path, folder: Path) -> Path:
    """Correct a calibration by the run's own steps, as `paceline calibrate RUN.yaml` does; return another file."""
    measured, own = folder / f"{spec.name}-measure", folder / f"{spec.name}.json"
    shutil.copy(calibration, own)
    measure(spec, numbers, repeats=2, steps=20, out=measured, log=lambda text: None)
    update_calibration(measured, own)
    return own


alone_s: dict[str, float] = {}
"""A step on one rank, by run: it has no links."""


def compare(name: str, spec: RunSpec, link: str, calibration: Path, numbers: Sequence[int]) -> Iterator[Line]:
    where = f"{max(numbers)}x1xlocal+{LINKS[link]}" if LINKS[link] else "local"
    plain = {"parallel.strategy": "ddp", "parallel.tensor": 1, "parallel.pipeline": 1}  # what is run below
    found = plan(spec.replace(plain), where, numbers, calibration=calibration)
    assert all(row.price.layout.plain for row in found.rows)
    predicted = {row.devices: row for row in found.rows}
    if link != "loopback":
        measured = {ranks: run_apart(spec, ranks) for ranks in numbers if ranks > 1}
    else:
        measured = {}
        for _ in range(ROUNDS):  # in turns, so that whatever else runs slows all of them alike
            for ranks in numbers:
                step_s = run_here(spec, ranks)
                measured[ranks] = min(step_s, measured.get(ranks, step_s))
        alone_s[name] = measured[1]
    for ranks, step_s in measured.items():
        row = predicted[ranks]
        yield Line(name, link, ranks, step_s, row.price.step_s, alone_s[name] / step_s, row.speedup, os.getloadavg()[0])


def show(line: Line) -> str:
    verdict = ("right" if line.verdict else "WRONG") if line.ranks > 1 else ""
    times = f"{line.measured_s * 1e3:8.1f} ms {line.predicted_s * 1e3:8.1f} ms"
    return (
        f"{line.run:<17} {line.link:<11} {line.ranks:5d} {times} "
        f"{line.measured:8.2f}× {line.predicted:8.2f}× {line.error:+7.0%} {line.load:6.1f}  {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shaped", action="store_true", help="over links of 1 Gbit/s and 100 Mbit/s too; needs root")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs, by name")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="how many, the first is 1")
    parser.add_argument("--own", action="store_true", help="correct the calibration by each run's own steps")
    parser.add_argument("--calibration", type=Path, help="use this instead of calibrating now")
    asked = parser.parse_args()
    numbers = [int(word) for word in asked.ranks.split(",")]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        calibration = asked.calibration or Path(folder) / "calibration.json"
        if asked.calibration is None:
            write_json(calibration, calibrate_machine(numbers, lambda text: print(text, file=sys.stderr), threads=1))
        print("run               link        ranks    measured    planned   measured   planned   error   load  verdict")
        files = {name: calibration for name, _ in specs(asked.runs.split(","))}
        for name, spec in specs(asked.runs.split(",")):
            if asked.own:
                files[name] = calibrate_run(spec, numbers, calibration, Path(folder))
            lines += _over(["loopback"], name, spec, files[name], numbers)
        if asked.shaped:
            with apart(max(numbers)):
                for link in ("1 Gbit/s", "100 Mbit/s"):
                    shape(max(numbers), LINKS[link])
                    for name, spec in specs(asked.runs.split(",")):
                        lines += _over([link], name, spec, files[name], numbers)
    alone, several = ([line for line in lines if (line.ranks > 1) == more] for more in (False, True))
    for words, some in (("one rank", alone), ("several ranks", several)):
        wrong = [abs(line.step_error) for line in some]
        print(f"step of {words}: mean error {statistics.mean(wrong):.1%}, largest {max(wrong):.1%}")
    errors = [abs(line.error) for line in several]
    within = sum(error <= 0.2 for error in errors)
    print(
        f"speed-up: mean error {statistics.mean(errors):.0%}, largest {max(errors):.0%}, {within} of {len(errors)} "
        f"within 20 %; verdict right in {sum(line.verdict for line in several)} of {len(several)}"
    )


def _over(links: Sequence[str], name: str, spec: RunSpec, calibration: Path, numbers: Sequence[int]) -> list[Line]:
    lines = []
    for link in links:
        for line in compare(name, spec, link, calibration, numbers):
            print(show(line), flush=True)
            lines.append(line)
    return lines


if __name__ == "__main__":
    main()
