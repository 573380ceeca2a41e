"""Two ranks with a slow network between them: does a second rank pay, and for which way of sending less?

    python benchmarks/slow_network.py [DATA_FOLDER] [--rates 100mbit 1gbit] [--steps 128] [--few 10]

Each rank has one core and a network namespace of its own. A veth pair joins them, shaped by tbf in both directions.
The model has 10 million parameters; the batch, and so the work of a step, is the same on 1 rank and on 2. What sends
little is trained for --steps, and the loss on the held-out texts is compared with that of 1 rank. What sends all
gradients is timed over --few steps: `exact` has the answer of 1 rank, and bf16 and fp16 are close to it
(saving_differences.py). 1 rank is timed before and after the modes of each link, and its mean counts.

Needs root, for namespaces. DATA_FOLDER holds AG News as train.csv and test.csv; without it the docstrings of the
installed packages are used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, build_spec
from paceline.io.files import read_json
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

LR = 5e-4
PREFIX = "paceline-slow-"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
CARD = "veth0"
PORT = 29_533
BURST = "256kb"  # messages of gradients are much larger
LOCAL = ("local_sgd", "diloco")
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that the addresses have no names
ALL_GRADIENTS = ("exact", "bf16", "fp16")


def spec_of(data: Path | None, steps: int, **parallel: object) -> RunSpec:
    """About 10 million parameters: 8.4 in the embedding of tokens, the rest in one layer."""
    source = {"source": "ag_news", "path": str(data.resolve())} if data else {"source": "docstrings"}
    rate = LR * 2**0.5 if parallel.get("reduce") == "local_sgd" else LR  # docs/saving_communication.md says why
    return build_spec(
        {
            "model": {"width": 512, "heads": 8, "layers": 1, "ffn": 512},
            "data": {**source, "max_length": 64, "vocab": 16384},
            "train": {
                "steps": steps,
                "global_batch": 96,
                "lr": rate,
                "warmup": 0.1,
                "checkpoint_every": 1 << 20,
                "evaluate_every": 1 << 20,
            },
            "parallel": {"threads": 1, "device": "cpu", **parallel},
        }
    )


# ---------------------------------------------------------------------------------------------------- the network


def why_not() -> str | None:
    """The reason for which there can be no slow network here."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if len(os.sched_getaffinity(0)) < 2:
        return "two ranks need two cores"
    try:
        with slow_link() as link:
            link.shape("1gbit")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


class Link:
    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names

    def shape(self, rate: str) -> None:
        """Both directions, each at that rate."""
        for name in self.names:
            _do("tc", "-n", name, "qdisc", "replace", "dev", CARD, "root", "tbf", "rate", rate, "burst", BURST,
                "latency", "50ms")  # fmt: skip


@contextmanager
def slow_link() -> Iterator[Link]:
    """Two namespaces and the link between them; gone at the end, however it ends."""
    _sweep()
    names = (f"{PREFIX}{os.getpid()}-0", f"{PREFIX}{os.getpid()}-1")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", names[0], "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", CARD)
            _do("ip", "-n", name, "link", "set", CARD, "up")
        yield Link(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _sweep() -> None:
    """Remove what a killed benchmark left behind."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for name in (line.split()[0] for line in listed if line.startswith(PREFIX)):
        if not Path("/proc", name.removeprefix(PREFIX).split("-")[0]).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


# ---------------------------------------------------------------------------------------------------- the runs


def train_on(link: Link, ranks: int, spec: RunSpec, out: Path) -> dict[str, Any]:
    """Train with one core and one namespace per rank: samples per second, with all that joining costs, and metrics."""
    folder = Path(tempfile.mkdtemp(dir=out))
    run_file = RunDir.claim(folder, "spec", spec).spec_file
    command = [sys.executable, "-m", "paceline", "train", str(run_file), "--quiet", "--out", str(folder / "runs")]
    cores = sorted(os.sched_getaffinity(0))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
            place |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": CARD}
            environ = os.environ | QUIET
            environ |= {name: str(value) for name, value in place.items()} if ranks > 1 else {}
            inside = ["ip", "netns", "exec", link.names[rank], *command]
            pin = partial(os.sched_setaffinity, 0, {cores[rank]})
            started.append(subprocess.Popen(inside, env=environ, preexec_fn=pin))
        for process in started:
            if process.wait(timeout=1800) != 0:
                raise SystemExit(f"a rank of {spec.parallel.reduce} failed")
    finally:
        for process in started:
            process.kill()
            process.wait()
    (run,) = (folder / "runs").iterdir()
    summary = read_json(run / "summary.json")
    steps = read_steps(RunDir(run).events_file(0))
    apart = spec.parallel.local_steps if spec.parallel.reduce in LOCAL and ranks > 1 else 0
    step_s, exposed_s = (usual(steps, name, apart) for name in ("step_s", "exposed_s"))
    return {
        "rate": spec.train.global_batch / step_s,
        "exposed": exposed_s / step_s,
        "loss": summary["metrics"]["loss"],
        "accuracy": summary["metrics"]["accuracy"],
        "parameters": summary["parameters"],
    }


def usual(steps: list[dict[str, Any]], name: str, apart: int) -> float:
    """A time of a usual step, with its share of what joining costs where ranks train apart for so many steps.

    Medians, after a few steps of warm-up: other programs take the machine now and then.
    """
    joining = [step[name] for step in steps if apart and step["step"] % apart == 0]
    others = [step[name] for step in steps[min(5, len(steps) // 3) :] if not (apart and step["step"] % apart == 0)]
    if not joining:
        return statistics.median(others)
    return ((apart - 1) * statistics.median(others) + statistics.median(joining)) / apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--modes", nargs="+", default=["exact", "bf16", "powersgd", "local_sgd", "diloco"])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--local-steps", type=int, default=32)
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no slow network here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    build_workload(spec_of(asked.data, 1)).prepare(print)
    with tempfile.TemporaryDirectory() as out, slow_link() as link:
        compare(link, asked, Path(out))


def compare(link: Link, asked: argparse.Namespace, out: Path) -> None:
    one = train_on(link, 1, spec_of(asked.data, asked.steps), out)
    print(f"{one['parameters']:,} parameters, {asked.steps} steps; 1 rank: final loss {one['loss']:.4f}", flush=True)
    print(f"{'link':>8} {'reduce':>10} {'ms/sample':>10} {'1 rank':>7} {'speed-up':>9} {'exposed':>8}  final loss")
    before = one["rate"]
    for rate in asked.rates:
        link.shape(rate)
        found = {}
        for mode in asked.modes:
            steps = asked.few if mode in ALL_GRADIENTS else asked.steps
            spec = spec_of(asked.data, steps, reduce=mode, local_steps=asked.local_steps, ranks=2)
            found[mode] = train_on(link, 2, spec, out)
        after = train_on(link, 1, spec_of(asked.data, 2 * asked.few), out)["rate"]
        alone = (before + after) / 2
        for mode, two in found.items():
            worse = two["loss"] / one["loss"] - 1
            loss = "" if mode in ALL_GRADIENTS else f"{two['loss']:.4f} ({worse:+.2%})"
            print(
                f"{rate:>8} {mode:>10} {1e3 / two['rate']:>10.2f} {1e3 / alone:>7.2f} {two['rate'] / alone:>9.2f} "
                f"{two['exposed']:>8.0%}  {loss}",
                flush=True,
            )
        before = after


if __name__ == "__main__":
    main()
