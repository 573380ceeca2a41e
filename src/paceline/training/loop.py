"""The loop: read it from top to bottom as the story of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.order import Make, Order, Serving, serve
from paceline.errors import RunFailed
from paceline.launch.signals import StopRequest
from paceline.layout import Layout
from paceline.parallel.ddp import share_buffers
from paceline.record.events import EventWriter
from paceline.record.timers import Flights, Reading
from paceline.spec import RunSpec
from paceline.training.checkpoint import Checkpoints
from paceline.training.evaluate import evaluate
from paceline.training.explain import equations
from paceline.training.optim import set_lr
from paceline.training.schedule import Schedule
from paceline.training.state import State
from paceline.workload import Samples, Workload

AT_MOST = 50
"""Steps between two readings of a device, however rarely they are shown: a request to stop is seen by then."""


@dataclass
class Job:
    """What one rank needs to train: built once, then handed to the loop."""

    spec: RunSpec
    workload: Workload
    samples: Samples
    layout: Layout
    rank: int
    device: torch.device
    state: State
    net: nn.Module
    order: Order
    steps: int
    schedule: Schedule
    flights: Flights
    checkpoints: Checkpoints
    events: EventWriter
    shown: Callable[[dict[str, Any]], None]
    """Told of every event, on the main rank: the progress bar, the loggers."""
    stop: StopRequest
    step: Callable[..., Tensor]
    make: Make
    at_once: int
    evaluation: dict[str, Any] = field(default_factory=dict)
    best: float | None = None
    """The highest score so far."""

    @property
    def parameters(self) -> int:
        return self.state.spread.parameters

    @property
    def spread_over(self) -> str:
        """The ranks and the batch, as an equation."""
        equation = self.layout.equation()
        return equation if self.layout.plain else f"{self.layout.grid()}; {equation}"

    def over(self, step: int) -> bool:
        return step == self.steps

    @property
    def ended(self) -> str:
        return f"all of its {self.steps} steps are done"

    def conclude(self) -> None:
        """A run that trains has nothing to add to its last checkpoint."""

    def equations(self) -> list[str]:
        return equations(self.spec, self.order.samples)


def train_loop(job: Job) -> str:
    """Train from the job's present step to its last; returns how it ended."""
    train, state, held_out = job.spec.train, job.state, job.workload.data("test")
    log, mine = Log(job), job.layout.data_rank(job.rank)
    job.net.train()

    for serving in serve(job.samples, job.order, job.layout, mine, state.step, job.steps, job.make, job.at_once):
        set_lr(state.optimizer, job.schedule(serving.turn.seen))
        stats = job.step(serving, job.workload, job.net, state, train, job.flights, job.stop.requested)
        state.step += 1
        last, epoch_end = state.step == job.steps, state.step % job.order.steps_per_epoch == 0
        evaluating = last or due(state.step, train.evaluate_every, epoch_end)
        saving = last or due(state.step, train.checkpoint_every, epoch_end)
        state.spread.saving.join(state.step, now=evaluating or saving)
        log.add(serving, stats)
        stopping = log.flush(now=evaluating or saving)

        score = None
        if held_out and evaluating and (last or not stopping):
            share_buffers(state.buffers(), job.layout)
            job.evaluation = evaluate(
                job.workload, state.spread.whole, held_out, job.device, train.precision, job.layout
            )
            score = job.workload.goodness(job.evaluation)
            log.event("evaluate", step=state.step, **job.evaluation)
            if score > (-inf if job.best is None else job.best):
                job.best, saving = score, True
            log.resume()
        if saving or stopping:
            state.settle()
            share_buffers(state.buffers(), job.layout)
            meta = {"step": state.step, "evaluation": job.evaluation, "best": job.best}
            job.checkpoints.save(state.tensors(), meta, score=score)
            log.event("checkpoint", step=state.step)
            log.resume()
        if stopping and not last:
            return "stopped"
    return "finished"


def due(step: int, every: int, epoch_end: bool) -> bool:
    return step % every == 0 if every else epoch_end


class Log:
    """Turns what the device found out into events, a few steps at a time so that nothing waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.every = 1 if job.device.type == "cpu" else min(job.spec.train.log_every, AT_MOST)
        self.waiting: list[tuple[dict[str, Any], Tensor, Reading]] = []
        self.resume()

    def resume(self) -> None:
        """The next step begins now: what was done since the last one was not training, nor what was sent for it."""
        self.job.flights.take()
        self.began = perf_counter()

    def add(self, serving: Serving, stats: Tensor) -> None:
        """Note a step that was handed to the device."""
        turn = serving.turn
        event = {
            "step": self.job.state.step,
            "epoch": turn.epoch,
            "samples": turn.seen + len(turn.ids),
            "batch": len(turn.ids),
            "lr": self.job.schedule(turn.seen),
            "data_s": serving.data_s,
        }
        if self.job.workload.unit:
            event[self.job.workload.unit] = serving.cost
        self.waiting.append((event, stats, self.job.flights.take()))

    def flush(self, now: bool) -> bool:
        """Write what is known, at the same steps on every rank; True when a rank was asked to stop."""
        if not self.waiting or not (now or len(self.waiting) >= self.every):
            return False
        numbers = torch.stack([stats for _, stats, _ in self.waiting]).tolist()
        step_s = (perf_counter() - self.began) / len(numbers)
        self.began = perf_counter()
        stopping = False
        for (event, _, flights), (loss_sum, count, norm, stops) in zip(self.waiting, numbers, strict=True):
            event["comm_s"], event["exposed_s"] = flights()
            event["step_s"] = step_s
            event["compute_s"] = max(0.0, step_s - event["data_s"] - event["exposed_s"])
            event["loss"], event["grad_norm"] = loss_sum / max(count, 1), norm
            event["skipped"] = not (abs(norm) < float("inf") and abs(loss_sum) < float("inf"))
            stopping |= stops > 0
            self.event("step", **event)
            self._watch(event)
        self.waiting.clear()
        self.job.events.flush()
        return stopping

    def _watch(self, event: dict[str, Any]) -> None:
        """The stated policy for a step that is not finite. fp16 may overflow now and then: its scale adapts."""
        train, scaler = self.job.spec.train, self.job.state.scaler
        if not event["skipped"] or train.nonfinite == "skip" or (scaler.active and float(scaler.scale) >= 1):
            return
        what = "loss" if not abs(event["loss"]) < float("inf") else "gradient norm"
        raise RunFailed(
            f"{what} is {event['loss'] if what == 'loss' else event['grad_norm']} at step {event['step']}; "
            f"that step was not applied. Try a smaller train.lr (now {event['lr']:.3g}) or a longer train.warmup, "
            "or pass over such steps with train.nonfinite=skip"
        )

    def event(self, kind: str, **values: Any) -> None:
        self.job.events.write(kind, **values)
        if self.job.rank == 0:
            self.job.shown({"kind": kind, **values})
