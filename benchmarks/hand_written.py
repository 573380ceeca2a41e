"""A hand-written DistributedDataParallel loop, and Paceline's loop beside it in the same processes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.config import RunSpec
from paceline.launch.environment import detect_rank
from paceline.launch.process_group import join_ranks
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.runlog.events import EventWriter, read_steps
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.trainer.context import RunContext
from paceline.trainer.loop import GradientJob
from paceline.trainer.setup import build_gradient_job
from paceline.workload import build_workload


def compare_steps(spec: RunSpec, out: str, rounds: int) -> tuple[float, float]:
    """(median seconds of a hand-written step, of Paceline's), the two taking turns in blocks."""
    place = detect_rank(os.environ)
    assert place is not None
    block, blocks, hand = 8, 2 * rounds + 1, []
    folder = Path(out)
    events_file = folder / f"rank{place.rank}.jsonl"
    with (
        join_ranks(place, "cpu", 1, 300) as device,
        EventWriter(events_file) as events,
        closing(CheckpointWriter(folder / "checkpoints", 1)) as checkpoints,
    ):
        context = RunContext(spec, layout_of(spec), place, device, folder, events, checkpoints, StopRequest())
        job = build_gradient_job(context, build_workload(spec))
        job.workload.data = lambda split: None  # type: ignore[method-assign]  # no evaluation between the blocks
        step = hand_written(job)
        for _ in range(blocks):
            hand += step(block)
            job.facts = replace(job.facts, steps=job.state.step + block)
            job.run()
    ours = [event["step_s"] for event in read_steps(events_file)]
    return statistics.median(hand[block:]), statistics.median(ours[block:])


def hand_written(job: GradientJob) -> Callable[[int], list[float]]:
    """What a careful person writes: DDP with bucket views, fused AdamW, clipping, batches made in the loop."""
    torch.manual_seed(0)
    model = DistributedDataParallel(job.workload.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    done = 0

    def block(count: int) -> list[float]:
        nonlocal done
        times = []
        for whole in job.loader.order.global_batches(done, done + count):
            began = perf_counter()
            (mine,) = job.loader.load([whole])
            batch = mine.micro_batches[0].batch
            total, number = job.workload.loss(model, batch)
            (total / number).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total.item()
            times.append(perf_counter() - began)
        done += count
        return times

    return block
