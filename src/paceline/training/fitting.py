"""Work that is not gradient descent: passes over all samples, recorded, saved and resumed like any other run.

A pass is a step of the record, and an epoch. The workload knows what a pass does (`Workload.passes`); this is the loop
around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.order import Order
from paceline.record.events import Status
from paceline.record.run_dir import RunDir
from paceline.record.timers import compute_s
from paceline.training.checkpoints.saved import Checkpoint, newest, read_tensors, restore
from paceline.training.context import Job, JobFacts, RunContext
from paceline.workload import Passes, PassWorkload

SAVED_EVERY = 50


@dataclass
class FitJob(Job):
    passes: Passes
    step: int = 0

    @property
    def done(self) -> bool:
        return self.passes.end is not None

    @property
    def end(self) -> str:
        return f"{self.step} passes, {self.passes.end_words()}"

    def restore(self, checkpoint: Checkpoint) -> None:
        restore(checkpoint, self.passes.room())
        self.passes.restored(checkpoint.meta["fit"])
        self.step = checkpoint.step

    def run(self) -> Status:
        self.passes.begin()
        every, samples = self.context.spec.train.checkpoint_every or SAVED_EVERY, self.passes.samples
        while not self.done:
            found = dict(self.passes.step(self.context.stop.requested))
            stopping = found.pop("flagged")
            self.step += 1
            seconds = compute_s(found["step_s"], found["data_s"], found["exposed_s"])
            at = {"step": self.step, "epoch": self.step - 1, "samples": self.step * samples, "batch": samples}
            self.context.event("step", **at, compute_s=seconds, skipped=False, **found)
            if self.done or stopping or self.step % every == 0:
                meta = {"step": self.step, "evaluation": {}, "best": None, "fit": self.passes.meta()}
                self.context.checkpoints.save(self.passes.tensors(), meta)
                self.context.event("checkpoint", step=self.step)
            if stopping and not self.done:
                return Status.STOPPED
        self.context.checkpoints.wait()
        self.context.event("done", step=self.step, why=self.passes.end_words())
        if self.context.place.rank == 0:
            self.conclude()
        return Status.FINISHED

    def conclude(self) -> None:
        checkpoint = newest(RunDir(self.context.folder).checkpoints, lambda text: None)
        assert checkpoint is not None
        self.passes.conclude(read_tensors(checkpoint), self.context.folder)


def fit_job(context: RunContext, workload: PassWorkload) -> FitJob:
    passes = workload.passes(context.device)
    order = Order(passes.samples, passes.samples, context.spec.train.seed)
    equations = passes.equations(context.place.world)
    facts = JobFacts(order, passes.most, passes.parameters, "; ".join(equations), equations)
    return FitJob(context, workload, facts, passes)
