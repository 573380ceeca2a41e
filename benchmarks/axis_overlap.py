"""What computing hides of the communication of divided sequences and experts, over a link of a known rate.

    python benchmarks/axis_overlap.py [--rates 250mbit 1gbit] [--steps 12] [--turns 2]

Two ranks on a core and in a network namespace each, joined as in slow_network.py, which needs root. Heads gathered at
once, as if nothing were overlapped, and in groups; tokens to experts without an expert for all of them beside, and
with one. Milliseconds of a step, in flight and exposed: medians of all turns, which alternate.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from slow_network import ADDRESSES, CARD, PORT, QUIET, Link, slow_link, why_not

from paceline.config import RunSpec, build_spec
from paceline.layout import parse_layout
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.workload import build_workload

DOCS = Path(__file__).resolve().parents[1] / "docs"
SEQUENCE, WARM = 2048, 3
DENSE = {"preset": "custom", "width": 256, "heads": 8, "kv_heads": 8, "layers": 2, "ffn": 256, "tied": True}
MIXTURE = {**DENSE, "experts": 4, "top_k": 2, "ffn": 128, "shared_ffn": 512}
TRAIN = "import sys\nimport paceline.layout\n{change}\nfrom paceline.cli.main import main\nsys.exit(main())"
AT_ONCE = "paceline.layout.HEAD_GROUPS = 1"
WAITING = """
from paceline.parallel.exchange import Exchange
begin = Exchange.begin
def begin_and_wait(self, *given):
    filled = begin(self, *given)
    with self.timer.blocking():
        self._pending[1][1].wait()
    return filled
Exchange.begin = begin_and_wait
"""


class Way(NamedTuple):
    name: str
    layout: str
    model: dict[str, Any]
    change: str = ""  # of the code, before it trains

    def spec(self, steps: int) -> RunSpec:
        data = {"source": "text", "path": str(DOCS / "*.md"), "sequence": SEQUENCE, "vocab": 300}
        rare = {"checkpoint_every": 1 << 20, "evaluate_every": 1 << 20, "evaluate_on": 1, "log_every": 1}
        train = {"steps": steps, "global_batch": 2, "compile": "off", **rare}
        parallel = {"threads": 1, "device": "cpu", **parse_layout(self.layout)}
        return build_spec({"workload": "lm", "model": self.model, "data": data, "train": train, "parallel": parallel})


WAYS = (
    Way("context:2, all heads at once", "context:2", DENSE, AT_ONCE),
    Way("context:2, in groups", "context:2", DENSE),
    Way("context:2:ring", "context:2:ring", DENSE),
    Way("ddp:2+expert:2, one after the other", "ddp:2+expert:2", MIXTURE, WAITING),
    Way("ddp:2+expert:2, beside the shared expert", "ddp:2+expert:2", MIXTURE),
)


def train_on(link: Link, way: Way, steps: int, out: Path) -> dict[str, list[float]]:
    """Train on both sides of the link; return the times of the steps behind the first few, in milliseconds."""
    folder = Path(tempfile.mkdtemp(dir=out))
    run_file = RunDir.claim(folder, "spec", way.spec(steps)).spec_file
    program = TRAIN.format(change=way.change)
    command = [sys.executable, "-c", program, "train", str(run_file), "--quiet", "--out", str(folder / "runs")]
    cores, started = sorted(os.sched_getaffinity(0)), list[subprocess.Popen[bytes]]()
    try:
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
            place |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": CARD}
            environ = os.environ | QUIET | {name: str(value) for name, value in place.items()}
            pin = partial(os.sched_setaffinity, 0, {cores[rank]})
            inside = ["ip", "netns", "exec", link.names[rank], *command]
            started.append(subprocess.Popen(inside, env=environ, preexec_fn=pin))
        if any(process.wait(timeout=600) for process in started):
            raise SystemExit(f"a rank of {way.name} failed")
    finally:
        for process in started:
            process.kill()
            process.wait()
    (run,) = (folder / "runs").iterdir()
    found = read_steps(RunDir(run).events_file(0))[WARM:]
    return {key: [step[key] * 1e3 for step in found] for key in ("step_s", "comm_s", "exposed_s")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["250mbit", "1gbit"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--ways", default="", help="only those whose layout begins so")
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no slow network here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ways = [way for way in WAYS if way.layout.startswith(asked.ways)]
    build_workload(ways[0].spec(1)).prepare(print)
    print(f"{'link':>8} {'':42} {'step ms':>8} {'in flight':>10} {'exposed':>8}", flush=True)
    with tempfile.TemporaryDirectory() as out, slow_link() as link:
        for rate in asked.rates:
            link.shape(rate)
            found: dict[str, dict[str, list[float]]] = {way.name: {} for way in ways}
            for way in ways * asked.turns:
                for key, times in train_on(link, way, asked.steps, Path(out)).items():
                    found[way.name].setdefault(key, []).extend(times)
            for name, times in found.items():
                step, flight, exposed = (statistics.median(times[key]) for key in ("step_s", "comm_s", "exposed_s"))
                print(f"{rate:>8} {name:42} {step:>8.1f} {flight:>10.1f} {exposed:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
