"""Building a rank's job; of training: model, wrapping, optimiser, data order, and how a step runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.data.order import Order, total_steps
from paceline.data.prefetch import Loader
from paceline.data.samples import training_samples
from paceline.execution import Execution, Reason, execution_of
from paceline.layout import layout_of
from paceline.parallel.wrapping import ModelSetup, ParallelModel, ability, parallelize
from paceline.record.timers import timer_of
from paceline.training import engines
from paceline.training.context import Job, JobFacts, RunContext
from paceline.training.evaluation import HeldOut
from paceline.training.explain import equations, evaluation_lines
from paceline.training.loop import FitJob, GradientJob
from paceline.training.schedule import schedule_of
from paceline.training.start import notes_of, start_of
from paceline.training.step import PipelineStep, State, Step
from paceline.workload import BaseWorkload, PassWorkload, Samples, Workload, traits_of


def job_of(context: RunContext, workload: BaseWorkload) -> Job:
    """The one place where kinds of work part ways."""
    match workload:
        case PassWorkload():
            return fit_job(context, workload)
        case Workload():
            return gradient_job(context, workload)
    raise TypeError(f"{type(workload).__name__} is neither a Workload nor a PassWorkload")


def fit_job(context: RunContext, workload: PassWorkload) -> FitJob:
    passes = workload.passes(context.device)
    order = Order(passes.samples, passes.samples, context.spec.train.seed)
    lines = passes.equations(context.place.world)
    facts = JobFacts(order, passes.most, passes.parameters, "; ".join(lines), lines)
    return FitJob(context, workload, facts, passes)


def gradient_job(context: RunContext, workload: Workload) -> GradientJob:
    spec, train, layout = context.spec, context.spec.train, layout_of(context.spec)
    samples = training_samples(workload)
    order = Order(len(samples), train.global_batch, train.seed)
    steps = total_steps(train, order)
    timer, execution = timer_of(context.device.type), _execution(context, workload, samples)
    setup = ModelSetup(workload, spec, layout, context.device, timer, execution)
    if (start := start_of(workload, context)) is not None:
        setup = replace(setup, begin=start)
    torch.manual_seed(train.seed)
    step = step_of(setup) if spec.parallel.engine == "torch" else engines.start(setup, context)
    collate = step.collate(samples, layout)
    loader = Loader(samples, order, layout, layout.data_rank(context.place.rank), collate, step.at_once)
    facts = JobFacts(
        order,
        steps,
        step.state.model.parameters,
        layout.equation() if layout.plain else f"{layout.grid()}; {layout.equation()}",
        [
            *equations(spec, order.samples),
            *evaluation_lines(workload, order.samples),
            *step.state.model.groups.words(),
            *([start.match.sentence()] if start is not None and start.match is not None else []),
        ],
        {"execution": setup.execution.words(), **notes_of(start)},
    )
    schedule = schedule_of(train, order.seen(steps))
    return GradientJob(context, workload, facts, layout, step, loader, schedule, HeldOut.of(workload, order))


def _execution(context: RunContext, workload: Workload, samples: Samples) -> Execution:
    train = context.spec.train
    if context.spec.parallel.engine != "torch":
        return Execution(compiled_layers=train.compile == "on", reason=Reason.OTHER_ENGINE)
    return execution_of(train, layout_of(context.spec), ability(context.device), traits_of(workload, samples))


def step_of(setup: ModelSetup, model: ParallelModel | None = None) -> Step:
    """A step as it was decided to run, of the parallel model that the setup gives, or of one that is there already."""
    workload, train, execution = setup.workload, setup.spec.train, setup.execution
    state = State.new(model or parallelize(setup), train, setup.device)
    pipeline = setup.layout.pipeline > 1
    padded = pipeline or (execution.compiled_layers and workload.compile_layers)
    if pipeline or not execution.recorded:
        return (PipelineStep if pipeline else Step)(workload, state, train, setup.timer, padded)
    from paceline.training.capture import AT_ONCE, RecordedStep

    net = state.model.unwrapped
    if not execution.compiled_whole:
        return RecordedStep(workload, state, train, setup.timer, padded, compiled=net)
    compiled = torch.compile(net, dynamic=True, options=compiler_options())
    return RecordedStep(workload, state, train, setup.timer, padded, AT_ONCE, compiled=compiled)


def compiler_options() -> dict[str, bool]:
    """Sums over rows and over columns in one kernel took more than twice as long as in two, where sizes vary."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}
