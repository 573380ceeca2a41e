"""What the ranks of `test_evaluate.py` do."""

import os
from contextlib import closing
from pathlib import Path

from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.process_group import join_ranks
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.runlog.events import EventWriter
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.trainer.context import RunContext
from paceline.trainer.evaluation import evaluate
from paceline.trainer.setup import build_gradient_job
from paceline.workload import build_workload


def evaluate_again(folder, spec, scratch):
    """The metrics of a run's newest checkpoint, as this rank computes them together with the others."""
    place = detect_rank(os.environ) or SINGLE_RANK
    scratch = Path(scratch) / str(place.world)
    with (
        join_ranks(place, "cpu", spec.parallel.threads, 120) as device,
        EventWriter(scratch / f"rank{place.rank}.jsonl") as events,
        closing(CheckpointWriter(scratch, 1)) as checkpoints,
    ):
        context = RunContext(spec, layout_of(spec), place, device, scratch, events, checkpoints, StopRequest())
        job = build_gradient_job(context, build_workload(spec))
        job.restore(find_newest(RunDir(Path(folder)).checkpoints, print))
        assert job.state.step > 0
        return evaluate(job, job.held_out)
