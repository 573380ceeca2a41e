"""The passes of a script's loop: between two of them, all that the loop of a workload does."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.prefetch import MicroBatch, RankBatch
from paceline.errors import UserError
from paceline.parallel.ddp import without_sync
from paceline.parallel.precision import HALF, autocast
from paceline.runlog.events import RunStatus
from paceline.script.guards import STEP_EXAMPLE, ModelView, check_loss, reject_mean_loss
from paceline.trainer.evaluation import HeldOut
from paceline.trainer.loop import GradientJob, StepActions, StepLog


@dataclass(frozen=True)
class PendingPass:
    """A batch that the script has, and for which it has not called `run.step` yet."""

    batch: RankBatch
    micro: MicroBatch
    last: bool
    """Of its global batch on this rank."""


class ScriptLoop:
    def __init__(self, job: GradientJob, dataset: Any, wrapping: ModelView, going: bool) -> None:
        self.job, self.dataset, self.wrapping, self.going = job, dataset, wrapping, going
        """`going`: False where all steps were done before."""
        self.log = StepLog(job)
        self.batch: RankBatch | None = None
        """The global batch that is under way, also while the script is out of its loop."""
        self.open: PendingPass | None = None
        self.due: StepActions | None = None
        """What the newest step makes due, until it is done."""
        self.score: float | None = None
        """Of the newest step, where it was evaluated."""
        self.saved = job.state.step
        """The step of the newest checkpoint."""
        self.stopped = False
        self.updating = False
        self.seen_loss = False
        self.found = torch.zeros(2, dtype=torch.float64, device=job.context.device)
        half = job.context.spec.train.precision in HALF
        self.backward_as = torch.autocast(job.context.device.type, enabled=False) if half else nullcontext()
        self.ahead = job.loader.prefetch(job.state.step, job.facts.steps)
        self.handed_out: Generator[Any] | None = None

    @property
    def steps(self) -> int:
        return self.job.state.step

    @property
    def over(self) -> bool:
        return not self.going or self.stopped or self.job.done

    def batches(self, by_epoch: bool) -> Generator[Any]:
        self.settle()
        self._leave_loop()
        self.handed_out = self._batches(by_epoch)
        return self.handed_out

    def _batches(self, by_epoch: bool) -> Generator[Any]:
        job, step = self.job, self.job.train_step
        each = job.facts.order.steps_per_epoch
        until = min(job.facts.steps, (self.steps // each + 1) * each) if by_epoch else job.facts.steps
        step.net.train()
        self.log.resume()
        while not self.over and self.steps < until:
            batch = self.batch = self.batch or next(self.ahead)
            job.before_step(batch)
            self.found.zero_()
            last = len(batch.micro_batches) - 1
            for index, micro in enumerate(batch.micro_batches):
                step.seed(batch, index)
                self.open, self.wrapping.called = PendingPass(batch, step.moved(micro), index == last), False
                with without_sync(step.net, last=index == last), autocast(step.train.precision, step.device):
                    yield self.open.micro.batch
                if self.open is not None:
                    raise UserError(f"a batch went by without run.step; call it once for each of them:  {STEP_EXAMPLE}")
            if self.stopping or not (self.job.done or self.steps == until):  # else the script may evaluate first
                self.settle()

    @property
    def stopping(self) -> bool:
        return self.due is not None and self.due.stopping

    def step(self, total: Tensor, count: float | Tensor) -> None:
        now, step = self.open, self.job.train_step
        if now is None:
            raise UserError("run.step was called twice for one batch, or outside of the loop; call it once for each")
        check_loss(total, count)
        self.wrapping.check_called()
        if not self.seen_loss:
            reject_mean_loss(total, -(-now.batch.samples // (self.job.layout.data * len(now.batch.micro_batches))))
            self.seen_loss = True
        try:
            with self.backward_as:
                self.found += step.backward(total, count, now.micro.weight, now.batch.samples)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise UserError(
                "loss.backward() was called before run.step, which does it itself; delete the line"
            ) from None
        self.open = None
        if now.last:
            self.batch = None
            self.updating = True
            stats = step.finish(self.found, now.batch.samples, self.job.context.stop.requested)
            self.updating = False
            torch.clear_autocast_cache()  # of the weights as they were: the script may evaluate inside of its loop
            self.due = self.job.after_step(now.batch, stats, self.log)

    def evaluate(self, held_out: HeldOut) -> None:
        """As the script asked to, here and now; a better score is saved."""
        self.score = self.job.evaluate(held_out)
        self.log.resume()
        if self.due is not None and (self.due.saving or self.job.stale == 0 or self.job.done):
            self._save()

    def settle(self) -> None:
        """Do what the newest step made due, unless it was done."""
        due = self.due
        if due is None:
            return
        if (due.saving or due.stopping or self.job.done) and self.saved < self.steps:
            self._save()
        self.stopped = due.stopping and not self.job.done
        self.due = self.score = None

    def _save(self) -> None:
        self.job.save(self.score)
        self.saved = self.steps
        self.log.resume()

    def end(self) -> RunStatus:
        """The script has left its loop."""
        if not self.steps:
            raise UserError(
                f"the script left its loop before its first step, and trained nothing; call  {STEP_EXAMPLE}"
            )
        self.settle()
        if not self.stopped and not self.job.done:
            self.job.ended = "the script left its loop"
            self._save()
        self.log.write()
        if self.stopped:
            return RunStatus.STOPPED
        self.job.note_why()
        return RunStatus.FINISHED

    def _leave_loop(self) -> None:
        """Of a loop that was left in the middle: what it had computed of a global batch is done again by the next."""
        if self.handed_out is not None:
            self.handed_out.close()
        if self.batch is not None:
            self.open, self.batch = None, replace(self.batch, data_s=0.0)  # nobody waits for it again
            self.job.state.model.local_parameters.clear()

    def close(self) -> None:
        """Of batches made ahead, and of what the loop entered."""
        self._leave_loop()
        self.ahead.close()
