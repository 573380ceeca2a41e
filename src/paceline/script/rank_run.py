"""A script's run on one rank: the training loop, turned inside out so that the script drives it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import RunSpec
from paceline.config.registry import StepWork, Traits
from paceline.data.order import Order
from paceline.data.samples import as_samples, load_training_samples
from paceline.data.workers import start_workers
from paceline.errors import RunFailed, UserError
from paceline.execution import CompileEstimate, Execution, decide_execution, estimate_compiling
from paceline.launch.environment import SINGLE_RANK, RankInfo
from paceline.launch.process_group import broadcast_from_main
from paceline.launch.signals import StopRequest
from paceline.layout import Layout
from paceline.nn.op_counter import OperationCounter
from paceline.parallel.channels_last import prefers_channels_last, use_channels_last
from paceline.parallel.compile import find_equal_layers, share_compiled
from paceline.parallel.parallelize import ModelSetup, compile_model, detect_target, parallelize
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Summary
from paceline.runlog.timers import build_timer
from paceline.script import api
from paceline.script.api import Model, ModelView, Schedule, ScriptRun, Sums, misuse_error
from paceline.script.script_loop import ScriptLoop
from paceline.script.workload import SCORE, Script, build_no_run_error
from paceline.trainer.checkpoint.reader import Stateful
from paceline.trainer.evaluation import HeldOut, evaluate, use_evaluation_mode
from paceline.trainer.init_from import WeightInitializer, build_initializer
from paceline.trainer.optim.user_optimizer import take_over_optimizer
from paceline.trainer.rank import RankSession, RunFolder, join_run, log_line, open_rank_session
from paceline.trainer.setup import build_job_around, reject_contradictions
from paceline.trainer.step.step import State, Step
from paceline.workload import ignore_log

AUTO = "auto"


@dataclass(eq=False)
class RankRunFactory:
    """Builds what a script's `paceline.run()` returns on one rank of a run."""

    spec: RunSpec
    layout: Layout
    rank_info: RankInfo
    show: bool
    folder: RunFolder
    outcome: tuple[Path, Summary] | None = None
    used: bool = False

    def note_ignored(self, file: Any, overrides: Mapping[str, Any]) -> None:
        known = {key: value for key, value, *_ in self.spec.fields()}
        ignored = [f"{key}={value}" for key, value in overrides.items() if str(known.get(key)) != str(value)]
        if ignored and self.show and self.rank_info.rank == 0:
            log_line(f"ignored in paceline.run: {', '.join(ignored)}; the run file and command line take precedence")

    @contextmanager
    def open(self) -> Iterator[ScriptRun]:
        """Join the other ranks while entered, and finish the run at the end."""
        if self.used:
            raise misuse_error("paceline.run", "again")
        self.used, spec, rank_info = True, self.spec, self.rank_info
        with StopRequest(unsupervised=rank_info is SINGLE_RANK) as stop, join_run(spec, rank_info) as device:
            log = log_line if self.show and rank_info.rank == 0 else ignore_log
            folder = self.folder
            run: RunDir = folder if isinstance(folder, RunDir) else broadcast_from_main(lambda: folder(log))
            self.folder = run
            with open_rank_session(run, spec, self.layout, rank_info, device, stop, self.show) as session:
                script = RankRun(session)
                with script.resources:
                    try:
                        yield script
                    except SystemExit as leaving:
                        message = f"{Path(spec.workload).name} exited inside its run, with code {leaving.code or 0}"
                        raise RunFailed(f"{message}; leave its loop with  break", code="user-code-failed") from None
                    script.finish()
                script.release()
            self.outcome = run.path, cast(Summary, session.summary)


class RankRun(ScriptRun):
    def __init__(self, session: RankSession) -> None:
        self.session, self.spec, self.device = session, session.context.spec, session.context.device
        self.rank, self.ranks = session.context.rank_info.rank, session.context.rank_info.world
        self.resources = ExitStack()  # worker processes and prefetched batches, until the run ends
        self._step: Step | None = None
        self._initializer: WeightInitializer | None = None
        self._loop: ScriptLoop | None = None
        self._kept: dict[str, Stateful] = {}
        self._by_epochs = False
        self._view: ModelView | None = None
        self._undecided = False  # whether compiling pays

    @property
    def steps(self) -> int:
        if self._loop is not None:
            return self._loop.steps
        checkpoint = self.session.context.checkpoint
        return 0 if checkpoint is None else checkpoint.step

    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        api.check_pair(self._step is not None, model, optimizer, others)
        context = self.session.context
        if optimizer is not None:
            context.spec = self.spec = api.apply_optimizer_rate(self.spec, optimizer)
        workload, spec = Script(self.spec), self.spec
        workload.given_model = model
        if schedule is not None:
            vars(workload)["schedule"] = schedule
        reject_contradictions(workload, evaluates=True)
        names = {id(p): name for name, p in model.named_parameters()}
        timer = build_timer(self.device.type)
        execution = self._decide(model)
        setup = ModelSetup(workload, spec, context.layout, self.device, timer, execution, context.notice)
        if (initializer := build_initializer(workload, context)) is not None:
            setup, self._initializer = replace(setup, begin=initializer), initializer
        wrapped = parallelize(setup)
        if execution.channels_last:
            use_channels_last(wrapped.unwrapped)
        self._setup = setup
        if optimizer is not None:
            take_over_optimizer(optimizer, names, spec.train.lr, wrapped.local_parameters, spec.parallel.strategy)
        state = State.new(wrapped, spec.train, self.device, optimizer=optimizer)
        self._step = Step(workload, state, spec.train, timer)
        self._step.notice = context.notice
        api.guard_optimizer(state.optimizer, lambda: self._loop is None or self._loop.updating)
        self._view = ModelView(wrapped.net)
        return cast(Model, self._view.model), state.optimizer

    def _decide(self, model: nn.Module, weighed: CompileEstimate | None = None) -> Execution:
        """Decide how a step runs; whether compiling pays is known after the first pass."""
        train, traits = self.spec.train, Traits(bool(find_equal_layers(model)), own_loop=True)
        execution = decide_execution(train, self.session.context.layout, detect_target(self.device), traits, weighed)
        self._undecided = execution.compiled and train.compile == "auto" and weighed is None
        if self._undecided:
            execution = replace(execution, compiled_layers=False, compiling=None)
        plain = self.device.type == "cpu" or train.compile == "off" or execution.compiled or self._undecided
        return replace(execution, channels_last=not plain and prefers_channels_last(model))

    def _decide_compiling(self, counter: OperationCounter, times: float) -> None:
        assert self._step is not None
        assert self._loop is not None
        model, layout, steps = self._step.state.model.unwrapped, self._setup.layout, self._loop.job.facts.steps
        operations = counter.operations * share_compiled(find_equal_layers(model))
        work = StepWork(operations, counter.moved_elements * times)
        execution = self._decide(model, estimate_compiling(work, steps, layout))
        if execution.compiled:
            compile_model(model, replace(self._setup, execution=execution))
            self._setup.notice(f"a step is {execution.describe()}, from the second on")

    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        if self._loop is None:
            self._loop = self._begin_loop(dataset, collate, workers)
        elif dataset is not self._loop.dataset:
            raise misuse_error("run.batches", "other data")
        elif not self._by_epochs and self._loop.job.done:
            raise misuse_error("run.batches", "again")
        return self._loop.batches(by_epoch=self._by_epochs)

    def _begin_loop(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, workers: int | None) -> ScriptLoop:
        if self._step is None or self._view is None:
            raise misuse_error("run.batches", "not prepared")
        api.check_dataset(dataset)
        api.reject_scheduler(self._step.state.optimizer)
        step, context, workload = self._step, self.session.context, cast(Script, self._step.workload)
        workload.given_data = dataset
        workload.collate = collate
        if workers is not None and getattr(self.spec.data, "workers", AUTO) == AUTO:
            workload.spec = self.spec.replace({"data.workers": workers}, "the script")
        layout = context.layout
        self.resources.enter_context(start_workers(workload, context.rank_info, -(-layout.global_batch // layout.data)))
        samples = load_training_samples(workload)
        order = Order.of(self.spec.train, samples)
        before = self.session.run.start().get("samples")
        if before not in (None, len(samples)):
            message = f"{self.session.run.path} started with {before} samples, and the script has {len(samples)} now"
            raise UserError(f"{message}; start a new run", code="conflict", key="run.batches")
        job = build_job_around(step, self._setup.execution, context, samples, order, self._initializer)
        notes, lines = {**job.facts.notes, "samples": len(samples)}, [*job.facts.equations, *self._describe_optimizer()]
        job.facts = replace(job.facts, notes=notes, equations=lines)
        job.extra = self._kept
        loop = ScriptLoop(job, dataset, self._view, running=self.session.begin(job))
        self.resources.callback(loop.close)
        if self._undecided:
            loop.counter, loop.decide = OperationCounter(), self._decide_compiling
        return loop

    def _describe_optimizer(self) -> list[str]:
        assert self._step is not None
        state, train = self._step.state, self.spec.train
        if not state.own_optimizer:
            return []
        rates = "its own schedule" if self._step.workload.has("schedule") else f"train.schedule={train.schedule}"
        clipping = f", and gradients are clipped to a norm of train.clip={train.clip:g}" if train.clip else ""
        return [f"{type(state.optimizer).__name__} of the script: its rates follow {rates}{clipping}"]

    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        if self._loop is None:
            raise misuse_error("run.step", "outside")
        self._loop.step(loss_sum, count)

    def epochs(self) -> Iterator[int]:
        self._by_epochs = True
        checkpoint = self.session.context.checkpoint
        meta = {"epoch": 0} if checkpoint is None else checkpoint.meta
        epoch = meta["epoch"] if checkpoint is None or "epoch" in meta else checkpoint.step // meta["steps_per_epoch"]
        while True:
            before = self._loop.steps if self._loop else -1
            yield epoch
            if self._loop is None or (self._loop.steps == before and not self._loop.over):
                raise misuse_error("run.epochs", "no step")
            self._loop.finish_step()
            if self._loop.over:
                return
            epoch = self._loop.job.facts.order.locate(self._loop.steps)[0]

    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        if self._loop is None:
            raise misuse_error("run.evaluate", "early")
        workload = cast(Script, self._loop.job.workload)
        workload.sums = sums
        if best:
            workload.callback_state[SCORE] = best
        samples = as_samples(dataset, None, "run.evaluate(dataset)")
        held_out = HeldOut(samples, np.arange(len(samples)))
        if not self._loop.running or self._loop.stopped:  # not recorded: without the stop there would be none
            return evaluate(self._loop.job, held_out)
        self._loop.evaluate(held_out)
        return dict(self._loop.job.evaluation)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self._step is None:
            raise misuse_error("run.evaluating", "not prepared")
        state = self._step.state
        with state.for_evaluation(), use_evaluation_mode(state.model.unwrapped, self.spec.train.precision, self.device):
            yield
        if self._loop is not None:
            self._loop.log.resume()

    def keep(self, **things: Stateful) -> None:
        """Save these objects with every checkpoint, and restore them on resume."""
        if self._loop is not None:
            raise misuse_error("run.keep", "late")
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise misuse_error("run.keep", "stateless", name=name, kind=type(thing).__name__)
        self._kept |= things

    def finish(self) -> None:
        """Save and summarise the run when the script leaves it."""
        if self._loop is None:
            raise build_no_run_error(self.spec)
        if self._loop.running:
            self.session.end(self._loop.end() or RunStatus.FINISHED)

    def release(self) -> None:
        """Release what holds the process group, before it is destroyed."""
        if self._view is not None:
            self._view.net = None
        self._step = self._loop = self.session.job = None
