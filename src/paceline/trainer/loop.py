"""Train by gradients, or fit by passes: read each `run` from top to bottom as the story of a run."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.config import Train
from paceline.data.order import total_steps
from paceline.data.prefetch import Loader, RankBatch
from paceline.layout import Layout
from paceline.parallel.ddp import broadcast_buffers
from paceline.runlog.events import RunStatus
from paceline.runlog.machine import RankUsage
from paceline.runlog.run_dir import RunDir
from paceline.runlog.timers import Reading, subtract_waiting
from paceline.trainer.agreement import check_replicas, dump_callback_state, run_callback
from paceline.trainer.anomalies import AnomalyDetector, build_nonfinite_error
from paceline.trainer.checkpoint import reader
from paceline.trainer.checkpoint.staging import flatten_state
from paceline.trainer.checkpoint.writer import CheckpointInterval, is_due
from paceline.trainer.context import Job
from paceline.trainer.evaluation import HeldOut, evaluate, write_evaluation_pictures
from paceline.trainer.optim.schedule import build_schedule, describe_schedule_change
from paceline.trainer.resume_guard import ANSWER_KEY
from paceline.trainer.step.step import State, Step
from paceline.workload import FitEnd, Passes, PassWorkload, Workload

MAX_UNREAD_STEPS = 50  # steps between two readings of a device: a request to stop is seen by then


@dataclass
class GradientJob(Job):
    workload: Workload
    layout: Layout
    train_step: Step
    loader: Loader
    schedule: Callable[[int], float]  # the learning rate at a number of samples seen
    held_out: HeldOut | None = None
    best: float | None = None
    stale: int = 0  # evaluations since then
    ended: str = ""
    extra: dict[str, reader.Stateful] = field(default_factory=dict)
    """What a script keeps in checkpoints beside model and optimiser."""

    @cached_property
    def interval(self) -> CheckpointInterval:
        return CheckpointInterval(self.context.spec.train.checkpoint_every, self.context.device, self.layout.ranks)

    @property
    def state(self) -> State:
        return self.train_step.state

    @property
    def done(self) -> bool:
        return self.state.step == self.facts.steps or bool(self.stop_reason)

    @property
    def stop_reason(self) -> str:
        patience = self.context.spec.train.patience
        if self.ended or not patience or self.stale < patience:
            return self.ended
        better = f"{self.stale} evaluations" if self.stale > 1 else "an evaluation"
        return f"{better} without a better {self.workload.score.removeprefix('-')} (train.patience={patience})"

    @property
    def end(self) -> str:
        if self.stop_reason:
            return f"it ended at step {self.state.step}: {self.stop_reason}"
        return f"all of its {self.facts.steps} steps are done"

    def describe_length_change(self, old: Train) -> str:
        order = self.facts.order
        planned = build_schedule(old, order.seen(total_steps(old, order)), self.workload)
        return describe_schedule_change(planned, self.schedule, order, self.state.step)

    def restore(self, checkpoint: reader.Checkpoint) -> None:
        self.state.restore(partial(reader.restore_checkpoint, checkpoint, partly=self.layout.pipeline > 1))
        self.state.step = checkpoint.step
        meta = checkpoint.meta
        self.evaluation, self.best = meta["evaluation"], meta["best"]
        self.stale, self.ended = meta.get("stale", 0), meta.get("ended", "")
        self.workload.callback_state = meta.get("callback_state", {})
        reader.restore_extra(checkpoint, self.extra)

    def run(self) -> RunStatus:
        log = StepLog(self)
        try:
            return self._train_steps(log)
        finally:
            log.write()

    def _train_steps(self, log: "StepLog") -> RunStatus:
        decides = bool(self.context.spec.train.patience) or self.workload.has("on_evaluate")  # then none is left out
        self.state.model.net.train()

        self.context.beat("data", self.state.step)
        for batch in self.loader.prefetch(self.state.step, self.facts.steps):
            self.before_step(batch)
            now = self.after_step(batch, self.train_step(batch, self.context.stop.requested), log)
            score, saving = None, now.saving
            if self.held_out and (now.evaluating or self.done) and (self.done or decides or not now.stopping):
                score = self.evaluate(self.held_out)
                saving = saving or self.stale == 0
                log.resume()
            if saving or now.stopping or self.done:
                self.save(score)
                log.resume()
            if self.done:
                break
            if now.stopping:
                return RunStatus.STOPPED
            self.context.beat("data", self.state.step)
        self.record_stop()
        return RunStatus.FINISHED

    def before_step(self, batch: RankBatch) -> None:
        self.context.beat("step", self.state.step)
        self.state.before_step(self.schedule(batch.global_batch.seen))

    def after_step(self, batch: RankBatch, stats: Tensor, log: "StepLog") -> "StepActions":
        """Count the step, average models over ranks if due, log `stats`, and return what is due next on all ranks."""
        train, state = self.context.spec.train, self.state
        state.step += 1
        last, epoch_end = self.done, self.loader.order.is_epoch_end(state.step)
        evaluating = last or is_due(state.step, train.evaluate_every, epoch_end)
        saving = last or self.interval.is_due(state.step, epoch_end)
        state.model.reduction.average_models(state.step, now=evaluating or saving)
        log.add(batch, stats)
        stopping = log.flush(now=evaluating or saving)
        if self.done:
            state.model.reduction.average_models(state.step, now=True)
        return StepActions(evaluating, saving, stopping)

    def record_stop(self) -> None:
        if self.stop_reason:
            self.context.event("done", step=self.state.step, why=self.stop_reason)

    def evaluate(self, held_out: HeldOut) -> float:
        """Evaluate on all ranks; record the event, best score and patience, run `on_evaluate`, and return the score."""
        self.context.beat("evaluation", self.state.step)
        broadcast_buffers(self.state.buffers(), self.layout)
        began = perf_counter()
        with self.state.for_evaluation():
            self.evaluation = evaluate(self, held_out)
            write_evaluation_pictures(self, held_out)
        score = self.workload.goodness(self.evaluation)
        better = score > (-inf if self.best is None else self.best)
        self.best, self.stale = (score, 0) if better else (self.best, self.stale + 1)
        step, device = self.state.step, self.context.device
        self.context.event("evaluate", step=step, **self.evaluation, evaluate_s=perf_counter() - began)
        self.ended = self.ended or run_callback(self.workload, "on_evaluate", step, self.evaluation, device)
        return score

    def save(self, score: float | None) -> None:
        """Average over ranks, raise if replicas differ, start writing a checkpoint, and set when the next is due."""
        self.context.beat("checkpoint", self.state.step)
        began = perf_counter()
        self.state.average_over_ranks()
        broadcast_buffers(self.state.buffers(), self.layout)
        numbers, extra = (reader.collect_extra(self.extra, tensors) for tensors in (False, True))
        meta = {
            "step": self.state.step,
            "epoch": self.facts.order.locate(self.state.step)[0],
            "evaluation": self.evaluation,
            "best": self.best,
            "stale": self.stale,
            "ended": self.ended,
            "callback_state": dump_callback_state(self.workload),
            ANSWER_KEY: self.answer,
            reader.GROUP_KEY: self.state.model.batch_layers.group,
            **({reader.EXTRA_KEY: numbers} if self.extra else {}),
        }
        tensors = self.state.tensors() | ({reader.EXTRA_KEY: extra} if self.extra else {})
        compared = perf_counter()
        check_replicas(self.state.replicas(tensors), self.layout, self.state.step, self.facts.order)
        compared = perf_counter() - compared
        self.context.checkpoints.save(tensors, meta, score=score)
        took = {"checkpoint_s": perf_counter() - began, "compare_s": compared}
        self.context.event("checkpoint", step=self.state.step, **took)
        if not self.done and (text := self.interval.adapt(self.state.step, took["checkpoint_s"])):
            self.context.event("notice", about="checkpoints", step=self.state.step, text=text)


@dataclass(frozen=True)
class StepActions:
    """What is due after a step, the same on every rank."""

    evaluating: bool
    saving: bool
    stopping: bool


class StepLog:
    """Turns what the device computed into events, a few steps at a time."""

    def __init__(self, job: GradientJob) -> None:
        self.job, self.context, self.timer = job, job.context, job.train_step.timer
        self.every = min(self.context.spec.train.log_every, MAX_UNREAD_STEPS)
        if self.context.device.type == "cpu" or job.workload.has("on_step"):
            self.every = 1
        self.local_losses: dict[int, float] = {}  # this rank's own, of steps that are not finite
        self.waiting: list[tuple[dict[str, Any], Tensor, Tensor | None, Reading]] = []
        """Steps that the device may not have finished."""
        self.compilations = job.train_step.times_made
        self.unread = 0  # steps since all ranks looked whether one of them was asked to stop
        self.stopping = False
        self.usage = RankUsage.of(self.context.device)
        self.known: deque[dict[str, Any]] = deque()  # events that are not written yet
        self.anomalies = AnomalyDetector(self.context)
        self.resume()

    def resume(self) -> None:
        """Start the clock of the next step: what was done since the last one was not training."""
        self.timer.take()
        self.began = perf_counter()

    def add(self, batch: RankBatch, stats: Tensor) -> None:
        whole = batch.global_batch
        event = {
            "step": self.job.state.step,
            "epoch": whole.epoch,
            "samples": whole.seen + len(whole.ids),
            "batch": len(whole.ids),
            "lr": self.job.schedule(whole.seen),
            "data_s": batch.data_s,
            "load_s": batch.load_s,
        }
        if self.job.workload.unit:
            event[self.job.workload.unit] = batch.cost
        self.waiting.append((event, stats, self.job.train_step.local_sums, self.timer.take()))
        self.unread += 1
        compilations = self.job.train_step.times_made
        if compilations != self.compilations:
            self.compilations = compilations
            self._read(compiled=True)
        self.write(2)  # while the device is at work on this step

    def flush(self, now: bool) -> bool:
        """Read what the device computed; return True, at the same step on every rank, if one was asked to stop.

        Events are written at once if somebody waits for them, else while the next steps are computed.
        """
        if not self.unread or not (now or self.unread >= self.every):
            return False
        self._read()
        stopping, self.stopping, self.unread = self.stopping, False, 0
        if used := self.usage.now():
            self.context.events.write("usage", step=self.job.state.step, **used)
        if now or stopping or self.every == 1 or any(event["skipped"] for event in self.known):
            self.write()
        return stopping

    def _read(self, compiled: bool = False) -> None:
        """Read the device's results of waiting steps into `known` events; steps read together get their mean time."""
        if not self.waiting:
            return
        numbers = torch.stack([stats for _, stats, _, _ in self.waiting]).tolist()
        step_s = (perf_counter() - self.began) / len(numbers)
        self.began = perf_counter()
        for (event, _, local, collectives), (loss_sum, count, norm, stops) in zip(self.waiting, numbers, strict=True):
            event["comm_s"], event["exposed_s"] = collectives()
            event["step_s"] = step_s
            event["compute_s"] = subtract_waiting(step_s, event["data_s"], event["exposed_s"])
            event["loss"], event["grad_norm"] = loss_sum / (count if count > 0 else 1), norm
            event["skipped"] = not (isfinite(norm) and isfinite(loss_sum))
            if event["skipped"] and local is not None:
                self.local_losses = {event["step"]: float(local[0])}
            if compiled:
                event["compiled"] = True
            self.stopping |= stops > 0
            self.known.append(event)
        self.waiting.clear()

    def write(self, most: int | None = None) -> None:
        if not self.known:
            return
        for _ in range(len(self.known) if most is None else min(most, len(self.known))):
            event = self.known.popleft()
            self.context.event("step", **event)
            self.anomalies.observe(event)
            self._check_finite(event)
            # without times, which differ between ranks: so would a decision based on them
            values = {name: value for name, value in event.items() if name != "step" and not name.endswith("_s")}
            reason = run_callback(self.job.workload, "on_step", event["step"], values, self.context.device)
            self.job.ended = reason or self.job.ended
        if not self.known:
            self.context.events.flush()

    def _check_finite(self, event: dict[str, Any]) -> None:
        """Raise RunFailed for a step that is not finite, unless it may be skipped."""
        train, scaler = self.context.spec.train, self.job.state.scaler
        if not event["skipped"] or train.nonfinite == "skip" or (scaler.adapts and float(scaler.scale) >= 1):
            return
        self.known.clear()  # the steps after this one failed the same way
        raise build_nonfinite_error(self.job, event, self.local_losses.get(event["step"]))


@dataclass
class FitJob(Job):
    """A fit by passes over all samples, saved and resumed like any other run; a pass is a step."""

    workload: PassWorkload
    passes: Passes
    step: int = 0

    @property
    def done(self) -> bool:
        return self.passes.end is not None

    @property
    def end(self) -> str:
        return f"{self.step} passes, {self.passes.end_words()}"

    @property
    def stop_reason(self) -> str:
        return self.passes.end_words() if self.passes.end not in (None, FitEnd.AS_ASKED) else ""

    def restore(self, checkpoint: reader.Checkpoint) -> None:
        reader.restore_checkpoint(checkpoint, self.passes.allocate_state(checkpoint.meta["fit"]))
        self.passes.load_state(checkpoint.meta["fit"])
        self.step, self.evaluation = checkpoint.step, checkpoint.meta["evaluation"]

    def run(self) -> RunStatus:
        self.passes.begin()
        usage = RankUsage.of(self.context.device)
        every, samples = self.context.spec.train.checkpoint_every, self.passes.samples
        every = self.workload.saved_every if every == "auto" else every or self.workload.saved_every
        while not self.done:
            self.context.beat("step", self.step)
            found = dict(self.passes.step(self.context.stop.requested))
            stopping = found.pop("flagged")
            self.step += 1
            seconds = subtract_waiting(found["step_s"], found["data_s"], found["exposed_s"])
            at = {"step": self.step, "epoch": self.step - 1, "samples": self.step * samples, "batch": samples}
            self.context.event("step", **at, compute_s=seconds, skipped=False, **found)
            if used := usage.now():
                self.context.events.write("usage", step=self.step, **used)
            self.context.beat("evaluation", self.step)
            began = perf_counter()
            if metrics := dict(self.passes.evaluate()):
                self.evaluation = metrics
                self.context.event("evaluate", step=self.step, **metrics, evaluate_s=perf_counter() - began)
            if self.done or stopping or self.step % every == 0:
                self.context.beat("checkpoint", self.step)
                meta = {"step": self.step, "evaluation": self.evaluation, "best": None, "fit": self.passes.meta()}
                meta[ANSWER_KEY] = self.answer
                tensors = self.passes.tensors()
                check_replicas(flatten_state(tensors), self.context.layout, self.step)
                self.context.checkpoints.save(tensors, meta)
                self.context.event("checkpoint", step=self.step)
            if stopping and not self.done:
                self.passes.close()
                return RunStatus.STOPPED
        self.passes.close()
        self.context.checkpoints.wait()
        self.context.event("done", step=self.step, why=self.passes.end_words())
        if self.context.rank_info.rank == 0:
            self.conclude()
        return RunStatus.FINISHED

    def conclude(self) -> None:
        checkpoint = reader.find_newest(RunDir(self.context.folder).checkpoints, lambda text: None)
        assert checkpoint is not None
        self.passes.conclude(reader.read_tensors(checkpoint), self.context.folder)
