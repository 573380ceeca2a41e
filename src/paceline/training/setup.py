"""Building a rank's job: model, wrapping, optimiser, data order, and where to begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.launch.environment import Place
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.measure.timers import DeviceFlights, Flights
from paceline.parallel.ddp import wrap
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.spec import RunSpec
from paceline.training.checkpoint import Checkpoint, Checkpoints, newest, restore
from paceline.training.data import Make, Order, one_by_one, pinned, total_steps
from paceline.training.loop import Job
from paceline.training.optim import optimizer_of
from paceline.training.precision import HALF, Scaler
from paceline.training.schedule import schedule_of
from paceline.training.state import State
from paceline.training.step import train_step
from paceline.workload import Samples, Workload, samples_of, workload_of


def build_job(
    spec: RunSpec,
    place: Place,
    device: torch.device,
    events: EventWriter,
    checkpoints: Checkpoints,
    stop: StopRequest,
) -> Job:
    train, layout, workload = spec.train, layout_of(spec), workload_of(spec)
    samples = samples_of(workload)
    order = Order(len(samples), train.global_batch, train.seed)
    steps = total_steps(train, order)
    torch.manual_seed(train.seed)
    model = _model(workload).to(device, torch.float64 if train.precision == "fp64" else None)
    state = State(model, optimizer_of(train, model), Scaler(train.precision, device))
    state.allocate()
    flights = DeviceFlights() if device.type == "cuda" else Flights()
    step, make, at_once = way_of(spec, model, place.world, device, samples, layout.micro_batch)
    return Job(
        spec=spec,
        workload=workload,
        samples=samples,
        layout=layout,
        rank=place.rank,
        device=device,
        state=state,
        net=parallelize(model, place.world, device, spec, flights),
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


def _model(workload: Workload) -> nn.Module:
    found: object = workload.model()
    if not isinstance(found, nn.Module):
        raise UserError(f"workload: model() returned {type(found).__name__}; it must return a torch.nn.Module")
    if not any(p.requires_grad for p in found.parameters()):
        raise UserError(f"workload: the model ({type(found).__name__}) has no parameters to train")
    return found


def parallelize(model: nn.Module, world: int, device: torch.device, spec: RunSpec, flights: Flights) -> nn.Module:
    """The order of wrapping. Data parallelism comes last: it must see the parameters as the optimiser does."""
    return model if world == 1 else wrap(model, device, spec.parallel.bucket_mb, flights)


def way_of(
    spec: RunSpec, model: nn.Module, world: int, device: torch.device, samples: Samples, most: int
) -> tuple[Callable[..., Tensor], Make, int]:
    """(how a step is done, how batches are made for it, how many of them at once).

    Compiled and recorded where that is possible: one CUDA device, half precision, and samples that come in few shapes.
    """
    train = spec.train
    if device.type == "cpu":
        return train_step, one_by_one(samples), 1
    able = world == 1 and train.precision in HALF and train.optimizer in ("adamw", "sgd") and hasattr(samples, "steady")
    if train.compile == "off" or not able:
        return train_step, one_by_one(samples, pinned), 1
    from paceline.training.capture import AT_ONCE, CapturedStep, in_parcels

    return CapturedStep(torch.compile(model, dynamic=True)), in_parcels(samples, most), AT_ONCE


def go_back(job: Job, run: RunDir, world: int, say: Callable[[str], None]) -> int:
    """Restore the newest whole checkpoint, if there is one; returns the step the run goes on from."""
    box: list[Any] = [None]
    if job.rank == 0:
        found = newest(run.checkpoints, say)
        box = [asdict(found) if found else None]
    if world > 1:
        dist.broadcast_object_list(box)
    if box[0] is None:
        return 0
    checkpoint = Checkpoint(**box[0])
    restore(checkpoint, job.state.tensors())
    job.state.step = checkpoint.step
    job.evaluation, job.best = checkpoint.meta["evaluation"], checkpoint.meta["best"]
    return checkpoint.step
