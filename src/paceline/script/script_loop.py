"""The loop of a script: between its passes, everything that the loop of a workload does."""

from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.prefetch import MicroBatch, RankBatch
from paceline.nn.op_counter import OperationCounter
from paceline.parallel.ddp import without_sync
from paceline.parallel.precision import HALF, autocast
from paceline.runlog.events import RunStatus
from paceline.script.api import ModelView, check_loss, misuse_error, reject_mean_loss
from paceline.trainer.evaluation import HeldOut
from paceline.trainer.loop import GradientJob, StepActions, StepLog


@dataclass(frozen=True)
class PendingPass:
    batch: RankBatch
    micro: MicroBatch
    last: bool


class ScriptLoop:
    def __init__(self, job: GradientJob, dataset: Any, view: ModelView, running: bool) -> None:
        """`running`: False if all steps were done before."""
        self.job, self.dataset, self.view, self.running = job, dataset, view, running
        self.log = StepLog(job)
        self.batch: RankBatch | None = None  # the current global batch, also while the script is out of its loop
        self.pending: PendingPass | None = None
        self.actions: StepActions | None = None  # what the newest step requires, until it is done
        self.score: float | None = None
        self.saved = job.state.step
        self.stopped = False
        self.updating = False
        self.seen_loss = False
        self.sums = torch.zeros(2, dtype=torch.float64, device=job.context.device)
        half = job.context.spec.train.precision in HALF
        self.backward_mode = torch.autocast(job.context.device.type, enabled=False) if half else nullcontext()
        self.prefetched = job.loader.prefetch(job.state.step, job.facts.steps)
        self.generator: Generator[Any] | None = None
        self.counter: OperationCounter | None = None  # of the first pass, if the run is still to decide by it
        self.decide: Callable[[OperationCounter, float], None] = lambda counter, times: None
        """Called after the first pass, with its work and how many of it a step is."""

    @property
    def steps(self) -> int:
        return self.job.state.step

    @property
    def over(self) -> bool:
        return not self.running or self.stopped or self.job.done

    def batches(self, by_epoch: bool) -> Generator[Any]:
        self.finish_step()
        self._leave_loop()
        self.generator = self._iter_batches(by_epoch)
        return self.generator

    def _iter_batches(self, by_epoch: bool) -> Generator[Any]:
        job, step = self.job, self.job.train_step
        order = job.facts.order
        end = order.first_step(order.locate(self.steps)[0] + 1) if by_epoch else job.facts.steps
        until = min(job.facts.steps, end)
        step.net.train()
        self.log.resume()
        while not self.over and self.steps < until:
            batch = self.batch = self.batch or next(self.prefetched)
            job.before_step(batch)
            self.sums.zero_()
            last = len(batch.micro_batches) - 1
            for index, micro in enumerate(batch.micro_batches):
                step.seed(batch, index)
                self.pending = PendingPass(batch, step.move_to_device(micro), index == last)
                self.view.called = False
                with (
                    without_sync(step.net, last=index == last),
                    autocast(step.train.precision, step.device),
                    step.running_pass(self.pending.micro) as given,
                    nullcontext() if self.counter is None else self.counter,
                ):
                    yield given
                if self.counter is not None:
                    self.decide(self.counter, self.job.layout.data * (last + 1))
                    self.counter = None
                if self.pending is not None:
                    raise misuse_error("run.step", "skipped")
            stopping = self.actions is not None and self.actions.stopping
            if stopping or not (self.job.done or self.steps == until):  # else the script may evaluate first
                self.finish_step()

    def step(self, total: Tensor, count: float | Tensor) -> None:
        now, step = self.pending, self.job.train_step
        if now is None:
            raise misuse_error("run.step", "twice")
        check_loss(total, count)
        self.view.check_called()
        if self.counter is not None:
            self.counter.counting = False  # the forward pass is over
        if not self.seen_loss:
            reject_mean_loss(total, -(-now.batch.samples // (self.job.layout.data * len(now.batch.micro_batches))))
            self.seen_loss = True
        try:
            with self.backward_mode:
                self.sums += step.backward(total, count, now.micro.weight, now.batch.samples)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise misuse_error("loss.backward", "early") from None
        self.pending = None
        if now.last:
            self.batch = None
            self.updating = True
            stats = step.finish(self.sums.clone(), now.batch.samples, self.job.context.stop.requested)
            self.updating = False
            torch.clear_autocast_cache()  # of the old weights: the script may evaluate inside its loop
            self.actions = self.job.after_step(now.batch, stats, self.log)

    def evaluate(self, held_out: HeldOut) -> None:
        self.score = self.job.evaluate(held_out)
        self.log.resume()
        if self.actions is not None and (self.actions.saving or self.job.stale == 0 or self.job.done):
            self._save_checkpoint()

    def finish_step(self) -> None:
        """Save a checkpoint if the newest step requires it, and set `stopped`; do nothing the second time."""
        actions = self.actions
        if actions is None:
            return
        if (actions.saving or actions.stopping or self.job.done) and self.saved < self.steps:
            self._save_checkpoint()
        self.stopped = actions.stopping and not self.job.done
        self.actions = self.score = None

    def _save_checkpoint(self) -> None:
        self.job.save(self.score)
        self.saved = self.steps
        self.log.resume()

    def end(self) -> RunStatus:
        if not self.steps:
            raise misuse_error("run.batches", "no step")
        self.finish_step()
        if not self.stopped and not self.job.done:
            self.job.ended = "the script left its loop"
            self._save_checkpoint()
        self.log.write()
        if self.stopped:
            return RunStatus.STOPPED
        self.job.record_stop()
        return RunStatus.FINISHED

    def _leave_loop(self) -> None:
        """Close the current loop; an unfinished global batch is computed again by the next."""
        if self.generator is not None:
            self.generator.close()
        if self.batch is not None:
            self.pending, self.batch = None, replace(self.batch, data_s=0.0)  # it is loaded already
            self.job.state.model.local_parameters.clear_gradients()

    def close(self) -> None:
        self._leave_loop()
        self.prefetched.close()
