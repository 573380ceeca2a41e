"""What the ranks of `test_evaluate.py` do."""

import os
from contextlib import closing
from pathlib import Path

from paceline.launch.environment import detect
from paceline.launch.group import joined
from paceline.launch.signals import StopRequest
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.training.checkpoint import Checkpoints
from paceline.training.evaluate import evaluate
from paceline.training.rank import ALONE
from paceline.training.setup import build_job, go_back


def evaluate_again(folder, spec, scratch):
    """The metrics of a run's newest checkpoint, as this rank computes them together with the others."""
    place = detect(os.environ) or ALONE
    scratch = Path(scratch) / str(place.world)
    with (
        joined(place, "cpu", spec.parallel.threads, 60) as device,
        EventWriter(scratch / f"rank{place.rank}.jsonl") as events,
        closing(Checkpoints(scratch, 1)) as checkpoints,
    ):
        job = build_job(spec, place, device, events, checkpoints, StopRequest())
        assert go_back(job, RunDir(Path(folder)), place.world, print) > 0
        held_out, precision = job.workload.data("test"), spec.train.precision
        return evaluate(job.workload, job.state.spread.whole, held_out, device, precision, job.layout)
