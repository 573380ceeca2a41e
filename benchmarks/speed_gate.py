"""Does the gate find steps that became 5 % slower, and leave unchanged ones alone?

    python benchmarks/speed_gate.py              # 20 + 20 comparisons with a baseline; half an hour on an idle machine
    python benchmarks/speed_gate.py --each 5

Each comparison is what `paceline measure RUN --baseline FILE` does: new runs with their repeats, by the trial runner. A
step waits for a fixed time without a core, so that only the noise of the machine around it is left.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from paceline import Workload
from paceline.config import build_spec
from paceline.config.sections import ModelSection, field
from paceline.measurement.baseline import Baseline, build_baseline, compare_with_baseline
from paceline.measurement.measure import measure

STEP_S = 0.1
SLOWER = 1.05


class Waiting(Workload):
    """A line through points, whose steps take `model.slower` times as long."""

    class Model(ModelSection):
        slower: float = field(1.0, "", "factor on the time of a step", gt=0)

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, split):
        x = torch.linspace(0, 1, 64)[:, None]
        return (x, 2 * x) if split == "train" else None

    def loss(self, model, batch):
        time.sleep(STEP_S * self.spec.model.slower)
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(y)


def measure_baseline(slower: float, repeats: int, steps: int) -> Baseline:
    values = {"name": "gate", "workload": f"{Path(__file__).resolve()}:Waiting", "model": {"slower": slower}}
    spec = build_spec({**values, "train": {"global_batch": 64, "steps": steps}})
    with tempfile.TemporaryDirectory() as folder:
        found = build_baseline(measure(spec, [1], repeats=repeats, steps=steps, out=Path(folder) / "m"))
    found.request.pop("model.slower", None)  # the planted change: a user's would be in the code
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=20, help="comparisons of either kind")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    before = measure_baseline(1.0, asked.repeats, asked.steps)
    plan = [1.0, SLOWER] * asked.each
    random.Random(0).shuffle(plan)
    flagged = {1.0: 0, SLOWER: 0}
    for k, slower in enumerate(plan, 1):
        worse = compare_with_baseline(Path("baseline"), before, measure_baseline(slower, asked.repeats, asked.steps))
        flagged[slower] += bool(worse)
        change = "; ".join(f"{one.term} {one.change:+.1%}" for one in worse) or "no worse"
        print(f"{k}/{len(plan)}: planted {slower - 1:+.0%}: {change}", flush=True)
    print(f"found {flagged[SLOWER]} of {asked.each} slow-downs; flagged {flagged[1.0]} of {asked.each} unchanged")


if __name__ == "__main__":
    main()
