"""Building a rank's job: model, wrapping, optimiser, data order, and where to begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.order import Make, Order, all_alike, as_it_is, one_by_one, pinned, total_steps
from paceline.errors import UserError
from paceline.launch.environment import Place
from paceline.launch.signals import StopRequest
from paceline.layout import Layout, layout_of
from paceline.parallel.precision import HALF, Scaler
from paceline.parallel.wrapping import can_compile, compiles_layers, parallelize
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.record.timers import DeviceFlights, Flights
from paceline.spec import RunSpec
from paceline.training import engines
from paceline.training.checkpoint import Checkpoint, Checkpoints, newest, restore
from paceline.training.loop import Job
from paceline.training.optim import optimizer_of
from paceline.training.schedule import schedule_of
from paceline.training.state import State
from paceline.training.step import pipeline_step, train_step
from paceline.workload import Samples, Workload, samples_of, workload_of


def build_job(
    spec: RunSpec,
    place: Place,
    device: torch.device,
    events: EventWriter,
    checkpoints: Checkpoints,
    stop: StopRequest,
    folder: Path | None = None,
) -> Job:
    """`folder` is the run's: an engine keeps its configuration there."""
    train, layout, workload = spec.train, layout_of(spec), workload_of(spec)
    samples = samples_of(workload)
    order = Order(len(samples), train.global_batch, train.seed)
    steps = total_steps(train, order)
    flights = DeviceFlights() if device.type == "cuda" else Flights()
    torch.manual_seed(train.seed)
    if spec.parallel.engine == "torch":
        spread = parallelize(workload, layout, device, spec, flights)
        state = State(spread, optimizer_of(train, spread.pieces), Scaler(train.precision, device))
        state.allocate()
        step, make, at_once = way_of(spec, workload, spread.whole, layout, device, samples)
    else:
        state, step = engines.start(spec, layout, place, workload, device, folder, flights)
        make, at_once = one_by_one(samples, pinned if device.type == "cuda" else as_it_is), 1
    return Job(
        spec=spec,
        workload=workload,
        samples=samples,
        layout=layout,
        rank=place.rank,
        device=device,
        state=state,
        net=state.spread.net,
        order=order,
        steps=steps,
        schedule=schedule_of(train, order.seen(steps)),
        flights=flights,
        checkpoints=checkpoints,
        events=events,
        shown=lambda event: None,
        stop=stop,
        step=step,
        make=make,
        at_once=at_once,
    )


def way_of(
    spec: RunSpec, workload: Workload, model: nn.Module, layout: Layout, device: torch.device, samples: Samples
) -> tuple[Callable[..., Tensor], Make, int]:
    """(how a step is done, how batches are made for it, how many of them at once).

    Compiled and recorded where that is possible: one CUDA device, half precision, and samples that come in few shapes.
    """
    train, layer_by_layer = spec.train, compiles_layers(spec, workload, device)
    finish = pinned if device.type == "cuda" else as_it_is
    passes = layout.passes(layout.global_batch)
    make = one_by_one(samples, finish)
    if layout.pipeline > 1 or (layer_by_layer and workload.compile_layers):
        if not hasattr(samples, "padded"):
            why = f"parallel.pipeline={layout.pipeline}" if layout.pipeline > 1 else "compile_layers"
            raise UserError(
                f"{why}: {type(samples).__name__} has no method padded(ids, keys, rows), and all passes must have the "
                "same shape; see paceline.workload.Samples"
            )
        make = all_alike(samples, math.ceil(layout.global_batch / (layout.data * passes)), finish)
    if layout.pipeline > 1:
        return pipeline_step, make, 1
    recorded = (
        can_compile(device)
        and train.compile != "off"
        and layout.ranks == 1
        and layout.plain
        and layout.checkpointing == "none"
        and passes == 1
        and train.precision in HALF
        and train.optimizer in ("adamw", "sgd")
        and hasattr(samples, "steady")
    )
    if not recorded:
        return train_step, make, 1
    from paceline.training.capture import AT_ONCE, CapturedStep, Shelf, in_parcels

    shelf = Shelf()
    make = in_parcels(samples, layout.micro_batch, shelf)
    if workload.compile_layers:
        return CapturedStep(model, shelf), make, 1
    return CapturedStep(torch.compile(model, dynamic=True, options=compiler_options()), shelf), make, AT_ONCE


def compiler_options() -> dict[str, bool]:
    """Sums over rows and over columns in one kernel took more than twice as long as in two, where sizes vary."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}


def go_back(job: Job, run: RunDir, world: int, say: Callable[[str], None]) -> int:
    """Restore the newest whole checkpoint, if there is one; returns the step the run goes on from."""
    checkpoint = newest_for_all(run, job.rank, world, say)
    if checkpoint is None:
        return 0
    job.state.restore(lambda tensors: restore(checkpoint, tensors, partly=job.layout.pipeline > 1))
    job.state.step = checkpoint.step
    job.evaluation, job.best = checkpoint.meta["evaluation"], checkpoint.meta["best"]
    return checkpoint.step


def newest_for_all(run: RunDir, rank: int, world: int, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint that the main rank finds, on every rank."""
    box: list[Any] = [None]
    if rank == 0:
        found = newest(run.checkpoints, say)
        box = [asdict(found) if found else None]
    if world > 1:
        dist.broadcast_object_list(box)
    return None if box[0] is None else Checkpoint(**box[0])
