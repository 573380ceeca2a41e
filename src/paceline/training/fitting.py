"""Work that is not gradient descent: passes over all samples, recorded, saved and resumed like any other run.

A pass is a step of the record, and an epoch. The workload knows what a pass does (`Workload.passes`); this is the loop
around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.data.order import Order
from paceline.launch.environment import Place
from paceline.launch.signals import StopRequest
from paceline.layout import Layout, layout_of
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.spec import RunSpec
from paceline.training.checkpoint import Checkpoints, newest, read_tensors, restore
from paceline.training.setup import newest_for_all
from paceline.workload import Passes, PassWorkload, workload_of

SAVED_EVERY = 50


@dataclass
class FitJob:
    """What one rank needs to fit; it answers the same questions as a `Job`."""

    spec: RunSpec
    workload: PassWorkload
    layout: Layout
    rank: int
    device: torch.device
    passes: Passes
    order: Order
    steps: int
    checkpoints: Checkpoints
    events: EventWriter
    shown: Callable[[dict[str, Any]], None]
    stop: StopRequest
    folder: Path
    step: int = 0
    evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return self.passes.parameters

    @property
    def spread_over(self) -> str:
        return "; ".join(self.equations())

    def over(self, step: int) -> bool:
        return bool(self.passes.why_done)

    @property
    def ended(self) -> str:
        return f"{self.step} passes, {self.passes.why_done}"

    def equations(self) -> list[str]:
        return self.passes.equations(self.layout.ranks)

    def conclude(self) -> None:
        """The result of the last checkpoint, for people; on the main rank, and again if a kill came before it."""
        checkpoint = newest(self.folder / "checkpoints", lambda text: None)
        assert checkpoint is not None
        self.passes.conclude(read_tensors(checkpoint), self.folder)


def build_fit(
    spec: RunSpec,
    place: Place,
    device: torch.device,
    events: EventWriter,
    checkpoints: Checkpoints,
    stop: StopRequest,
    folder: Path,
) -> FitJob:
    workload = workload_of(spec)
    passes = workload.passes(device)
    order = Order(passes.samples, passes.samples, spec.train.seed)
    return FitJob(
        spec=spec,
        workload=workload,
        layout=layout_of(spec),
        rank=place.rank,
        device=device,
        passes=passes,
        order=order,
        steps=passes.most,
        checkpoints=checkpoints,
        events=events,
        shown=lambda event: None,
        stop=stop,
        folder=folder,
    )


def go_back(job: FitJob, run: RunDir, world: int, say: Callable[[str], None]) -> int:
    """Restore the newest whole checkpoint, if there is one; returns the pass the run goes on from."""
    checkpoint = newest_for_all(run, job.rank, world, say)
    if checkpoint is None:
        return 0
    restore(checkpoint, job.passes.room())
    job.passes.restored(checkpoint.meta["fit"])
    job.step = checkpoint.step
    return checkpoint.step


def fit_loop(job: FitJob) -> str:
    """Pass after pass, until the fit is done or asked to stop; returns how it ended."""
    job.passes.begin()
    every = job.spec.train.checkpoint_every or SAVED_EVERY
    while not job.passes.why_done:
        found = dict(job.passes.step(job.stop.requested))
        stopping = found.pop("flagged")
        job.step += 1
        _note(job, found)
        if job.passes.why_done or stopping or job.step % every == 0:
            meta = {"step": job.step, "evaluation": {}, "best": None, "fit": job.passes.meta()}
            job.checkpoints.save(job.passes.tensors(), meta)
            _event(job, "checkpoint", step=job.step)
        if stopping and not job.passes.why_done:
            return "stopped"
    job.checkpoints.wait()
    _event(job, "done", step=job.step, why=job.passes.why_done)
    if job.rank == 0:
        job.conclude()
    return "finished"


def _note(job: FitJob, found: dict[str, Any]) -> None:
    _event(
        job,
        "step",
        step=job.step,
        epoch=job.step - 1,
        samples=job.step * job.passes.samples,
        batch=job.passes.samples,
        compute_s=max(0.0, found["step_s"] - found["data_s"] - found["exposed_s"]),
        skipped=False,
        **found,
    )


def _event(job: FitJob, kind: str, **values: Any) -> None:
    job.events.write(kind, **values)
    if job.rank == 0:
        job.shown({"kind": kind, **values})
