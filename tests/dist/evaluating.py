"""What the ranks of `test_evaluate.py` do."""

import os
from contextlib import closing
from pathlib import Path

from paceline.launch.environment import ALONE, detect
from paceline.launch.group import joined
from paceline.launch.signals import StopRequest
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.training.checkpoints.saved import newest
from paceline.training.checkpoints.writer import CheckpointWriter
from paceline.training.context import RunContext
from paceline.training.evaluation import evaluate
from paceline.training.setup import gradient_job
from paceline.workload import workload_of


def evaluate_again(folder, spec, scratch):
    """The metrics of a run's newest checkpoint, as this rank computes them together with the others."""
    place = detect(os.environ) or ALONE
    scratch = Path(scratch) / str(place.world)
    with (
        joined(place, "cpu", spec.parallel.threads, 120) as device,
        EventWriter(scratch / f"rank{place.rank}.jsonl") as events,
        closing(CheckpointWriter(scratch, 1)) as checkpoints,
    ):
        context = RunContext(spec, place, device, scratch, events, checkpoints, StopRequest())
        job = gradient_job(context, workload_of(spec))
        job.restore(newest(RunDir(Path(folder)).checkpoints, print))
        assert job.state.step > 0
        return evaluate(job, job.held_out)
