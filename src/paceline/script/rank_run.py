"""A script's run on one rank: the loop of `paceline.trainer.loop`, turned inside out so that the script drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from paceline.config import RunSpec
from paceline.data.order import Order
from paceline.data.samples import as_samples, load_training_samples
from paceline.data.workers import start_workers
from paceline.errors import RunFailed, UserError
from paceline.execution import Execution, NoGraphReason
from paceline.launch.environment import SINGLE_RANK, RankInfo
from paceline.launch.process_group import broadcast_from_main, gather_objects
from paceline.launch.signals import StopRequest
from paceline.layout import Layout
from paceline.parallel.parallelize import ModelSetup, parallelize
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Summary
from paceline.runlog.timers import build_timer
from paceline.script.api import Model, Schedule, ScriptRun, Sums
from paceline.script.guards import (
    ModelView,
    apply_optimizer_rate,
    check_dataset,
    check_pair,
    guard_optimizer,
    reject_scheduler,
    take_share,
)
from paceline.script.injected_run import NO_RUN_TEXT
from paceline.script.script_loop import ScriptLoop
from paceline.script.workload import SCORE, Script
from paceline.trainer.checkpoint.reader import Stateful
from paceline.trainer.evaluation import HeldOut, evaluate, use_evaluation_mode
from paceline.trainer.init_from.match import WeightInitializer, build_initializer
from paceline.trainer.optim.user_optimizer import take_over_optimizer
from paceline.trainer.rank import RankSession, RunFolder, ignore_line, join_run, log_line, open_rank_session
from paceline.trainer.setup import build_job_around, reject_contradictions
from paceline.trainer.step.step import State, Step

AUTO = "auto"
"""`data.workers` of a run file that leaves it to the script."""


@dataclass(eq=False)
class RankRunFactory:
    """What a script's `paceline.run()` becomes on one rank of a run."""

    spec: RunSpec
    layout: Layout
    rank_info: RankInfo
    show: bool
    folder: RunFolder
    outcome: tuple[Path, Summary] | None = None
    used: bool = False

    def note_ignored(self, file: str | Path | None, overrides: Mapping[str, Any]) -> None:
        here = {key: value for key, value, *_ in self.spec.fields()}
        lost = [f"{key}={value}" for key, value in overrides.items() if str(here.get(key)) != str(value)]
        if lost and self.show and self.rank_info.rank == 0:
            log_line(
                f"the script gives paceline.run {', '.join(lost)}: left aside, the run file and command line count"
            )

    @contextmanager
    def opened(self) -> Iterator[ScriptRun]:
        """Join the other ranks, and be one of them until the script is through."""
        if self.used:
            raise UserError("paceline.run was called a second time; a script that paceline starts has one run")
        self.used, spec, rank_info = True, self.spec, self.rank_info
        with StopRequest(unsupervised=rank_info is SINGLE_RANK) as stop, join_run(spec, rank_info) as device:
            speak = log_line if self.show and rank_info.rank == 0 else ignore_line
            folder = self.folder
            run: RunDir = folder if isinstance(folder, RunDir) else broadcast_from_main(lambda: folder(speak))
            self.folder = run
            with open_rank_session(run, spec, self.layout, rank_info, device, stop, self.show) as work:
                script = RankRun(work)
                with script.held:
                    with _reject_exit(spec):
                        yield script
                    script.finish()
                script.let_go()
            self.outcome = run.path, cast(Summary, work.summary)


@contextmanager
def _reject_exit(spec: RunSpec) -> Iterator[None]:
    try:
        yield
    except SystemExit as leaving:
        raise RunFailed(
            f"{Path(spec.workload).name} ended itself inside of its run, with exit code {leaving.code or 0}; to end a "
            "run early, leave its loop with  break"
        ) from None


class RankRun(ScriptRun):
    def __init__(self, work: RankSession) -> None:
        self.work, self.spec, self.device = work, work.context.spec, work.context.device
        self.rank, self.ranks = work.context.rank_info.rank, work.context.rank_info.world
        self.held = ExitStack()
        """What a data set needs until the run ends: worker processes, batches that are made ahead."""
        self._step: Step | None = None
        self._start: WeightInitializer | None = None
        self._passes: ScriptLoop | None = None
        self._kept: dict[str, Stateful] = {}
        self._by_epochs = False
        self._wrapping: ModelView | None = None

    @property
    def steps(self) -> int:
        if self._passes is not None:
            return self._passes.steps
        checkpoint = self.work.context.checkpoint
        return 0 if checkpoint is None else checkpoint.step

    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        check_pair(self._step is not None, model, optimizer, others)
        context = self.work.context
        if optimizer is not None:
            context.spec = self.spec = apply_optimizer_rate(self.spec, optimizer)
        workload, spec = Script(self.spec), self.spec
        workload.given_model = model
        if schedule is not None:
            vars(workload)["schedule"] = schedule
        reject_contradictions(workload, evaluates=True)
        names = {id(p): name for name, p in model.named_parameters()}
        timer = build_timer(self.device.type)
        setup = ModelSetup(workload, spec, context.layout, self.device, timer, self._execution)
        if (start := build_initializer(workload, context)) is not None:
            setup, self._start = replace(setup, begin=start), start
        wrapped = parallelize(setup)
        if optimizer is not None:
            take_over_optimizer(optimizer, names, spec.train.lr, wrapped.local_parameters, spec.parallel.strategy)
        state = State.new(wrapped, spec.train, self.device, optimizer=optimizer)
        self._step = Step(workload, state, spec.train, timer)
        self._step.notice = lambda text: context.event("notice", text=text)
        guard_optimizer(state.optimizer, lambda: self._passes is None or self._passes.updating)
        self._wrapping = ModelView(wrapped.net)
        return cast(Model, self._wrapping.model), state.optimizer

    @property
    def _execution(self) -> Execution:
        return Execution(compiled_layers=self.spec.train.compile == "on", reason=NoGraphReason.OWN_LOOP)

    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        if self._passes is None:
            self._passes = self._begin(dataset, collate, workers)
        elif dataset is not self._passes.dataset:
            raise UserError("run.batches was given another data set than before; a run has one, made before its loop")
        elif not self._by_epochs and self._passes.job.done:
            raise UserError(
                "run.batches was asked for a second time, and the first loop had all batches of the run; to take them "
                "epoch by epoch, write  for epoch in run.epochs():  around it"
            )
        return self._passes.batches(by_epoch=self._by_epochs)

    def _begin(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, workers: int | None) -> ScriptLoop:
        """The job, now that its data are known, where the run stands."""
        if self._step is None or self._wrapping is None:
            raise UserError("run.batches comes after  model, optimizer = run.prepare(model, optimizer)")
        check_dataset(dataset)
        reject_scheduler(self._step.state.optimizer)
        step, context, workload = self._step, self.work.context, cast(Script, self._step.workload)
        workload.given_data = dataset
        workload.collate = collate
        if workers is not None and getattr(self.spec.data, "workers", AUTO) == AUTO:
            workload.spec = self.spec.replace({"data.workers": workers}, "the script")
        layout = context.layout
        self.held.enter_context(start_workers(workload, context.rank_info, -(-layout.global_batch // layout.data)))
        samples = load_training_samples(workload)
        order = Order.of(self.spec.train, len(samples))
        before = self.work.run.start().get("samples")
        if before not in (None, len(samples)):
            raise UserError(
                f"{self.work.run.path} was begun on {before} samples, and the script has {len(samples)} now; bring "
                "them back, or start a new run"
            )
        job = build_job_around(step, self._execution, context, samples, order, self._start)
        notes, lines = {**job.facts.notes, "samples": len(samples)}, [*job.facts.equations, *self._own_words()]
        job.facts = replace(job.facts, notes=notes, equations=lines)
        job.kept = self._kept
        passes = ScriptLoop(job, dataset, self._wrapping, going=self.work.begin(job))
        self.held.callback(passes.close)
        return passes

    def _own_words(self) -> list[str]:
        """What the run file does to an optimiser of the script's own."""
        assert self._step is not None
        state, train = self._step.state, self.spec.train
        if not state.own_optimizer:
            return []
        rates = "its own schedule" if self._step.workload.has("schedule") else f"train.schedule={train.schedule}"
        cut = f", and gradients are cut to a norm of train.clip={train.clip:g}" if train.clip else ""
        return [f"{type(state.optimizer).__name__} of the script: its rates follow {rates}{cut}"]

    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        if self._passes is None:
            raise UserError("run.step is called inside of  for … in run.batches(train_set):")
        self._passes.step(loss_sum, count)

    def epochs(self) -> Iterator[int]:
        self._by_epochs = True
        checkpoint = self.work.context.checkpoint
        epoch = 0 if checkpoint is None else checkpoint.step // checkpoint.meta["steps_per_epoch"]
        while True:
            before = self._passes.steps if self._passes else -1
            yield epoch
            if self._passes is None or (self._passes.steps == before and not self._passes.over):
                raise UserError(
                    "an epoch of run.epochs() went by without a step; ask for its batches by  run.batches(train_set)"
                )
            self._passes.settle()
            if self._passes.over:
                return
            epoch = self._passes.steps // self._passes.job.facts.order.steps_per_epoch

    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        if self._passes is None:
            raise UserError("run.evaluate comes when run.batches has begun: at the end of an epoch, or after the loop")
        workload = cast(Script, self._passes.job.workload)
        workload.sums = sums
        if best:
            workload.callback_state[SCORE] = best
        samples = as_samples(dataset, None, "run.evaluate(dataset)")
        held_out = HeldOut(samples, np.arange(len(samples)))
        if not self._passes.going or self._passes.stopped:  # no evaluation of the run as it would be without a stop
            return evaluate(self._passes.job, held_out)
        self._passes.evaluate(held_out)
        return dict(self._passes.job.evaluation)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self._step is None:
            raise UserError("run.evaluating comes after  model, optimizer = run.prepare(model, optimizer)")
        state = self._step.state
        with state.for_evaluation(), use_evaluation_mode(state.model.unwrapped, self.spec.train.precision, self.device):
            yield
        if self._passes is not None:
            self._passes.log.resume()

    def total(self, **sums: float | Tensor) -> dict[str, float]:
        everyone = gather_objects({name: float(value) for name, value in sums.items()})
        return {name: fsum(rank[name] for rank in everyone) for name in sums}

    def share(self, dataset: Any) -> Any:
        layout = self.work.context.layout
        return take_share(dataset, self.rank, self.ranks, together=not layout.plain and layout.strategy != "zero1")

    def keep(self, **things: Stateful) -> None:
        if self._passes is not None:
            raise UserError("run.keep comes before run.batches, which gives each thing the state that it had")
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UserError(
                    f"run.keep({name}=…): {type(thing).__name__} has no state_dict and load_state_dict; checkpoints "
                    "hold what these give and take"
                )
        self._kept |= things

    def finish(self) -> None:
        """The script left the run: what is due is saved, and the run summed up."""
        if self._passes is None:
            raise UserError(NO_RUN_TEXT.format(name=Path(self.spec.workload).name))
        if self._passes.going:
            self.work.end(self._passes.end() or RunStatus.FINISHED)

    def let_go(self) -> None:
        """Of what holds the process group, which is about to end."""
        if self._wrapping is not None:
            self._wrapping.net = None
        self._step = self._passes = self.work.job = None
