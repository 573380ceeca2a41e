"""Building a rank's job; of training: model, wrapping, optimiser, data order, and how a step runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.order import Order, total_steps
from paceline.data.prefetch import Loader
from paceline.data.samples import training_samples, traits_of
from paceline.data.workers import worker_notes, worker_words
from paceline.execution import Execution, Reason, compiling, execution_of
from paceline.layout import layout_of
from paceline.nn.keras_backend import holds_keras
from paceline.parallel.precision import lack_of_tf32
from paceline.parallel.wrapping import ModelSetup, ParallelModel, ability, parallelize
from paceline.record.pauses import Pauses
from paceline.record.timers import timer_of
from paceline.registry import Traits, entry_of
from paceline.training import engines
from paceline.training.checkpoints import ahead
from paceline.training.context import Job, JobFacts, RunContext
from paceline.training.evaluation import HeldOut
from paceline.training.explain import IN_TURNS, equations, evaluation_lines
from paceline.training.loop import FitJob, GradientJob
from paceline.training.optim.schedule import schedule_of
from paceline.training.refusals import refuse_contradictions
from paceline.training.start.match import Start, notes_of, start_of
from paceline.training.steps.step import PipelineStep, State, Step
from paceline.workload import BaseWorkload, PassWorkload, Samples, Workload

if TYPE_CHECKING:
    from paceline.training.steps.capture import RecordedStep


def job_of(context: RunContext, workload: BaseWorkload) -> Job:
    """The one place where kinds of work part ways."""
    match workload:
        case PassWorkload():
            return fit_job(context, workload)
        case Workload():
            return gradient_job(context, workload)
    raise TypeError(f"{type(workload).__name__} is neither a Workload nor a PassWorkload")


def fit_job(context: RunContext, workload: PassWorkload) -> FitJob:
    workload.folder = context.folder
    passes = workload.passes(context.device)
    order = Order(passes.samples, passes.samples, context.spec.train.seed)
    lines = passes.equations(context.place.world)
    facts = JobFacts(order, passes.most, passes.parameters, "; ".join(lines), lines)
    return FitJob(context, workload, facts, passes)


def gradient_job(context: RunContext, workload: Workload) -> GradientJob:
    spec, train, layout = context.spec, context.spec.train, layout_of(context.spec)
    samples = training_samples(workload)
    order = Order.of(train, len(samples))
    steps, held_out = total_steps(train, order), HeldOut.of(workload, order)
    refuse_contradictions(workload, evaluates=held_out is not None)
    timer, execution = timer_of(context.device.type), _execution(context, workload, samples)
    setup = ModelSetup(workload, spec, layout, context.device, timer, execution)
    if (start := start_of(workload, context)) is not None:
        setup = replace(setup, begin=start, begins_whole=start.gives_all)
    torch.manual_seed(train.seed)
    if execution.compiled_layers:
        ahead.finish()
    if spec.parallel.engine == "torch":
        step, execution = _settled(setup, samples, order, steps)
    else:
        step, execution = engines.start(setup, context), setup.execution
    if execution.recorded and not execution.compiled:
        ahead.begin()
    step.notice = lambda text: context.event("notice", text=text)
    return job_around(step, execution, context, samples, start, held_out)


def job_around(
    step: Step,
    execution: Execution,
    context: RunContext,
    samples: Samples,
    start: Start | None,
    held_out: HeldOut | None = None,
) -> GradientJob:
    """The job of a step that is there: its samples in their order, its length and its schedule."""
    spec, train, layout, workload = context.spec, context.spec.train, layout_of(context.spec), step.workload
    order = Order.of(train, len(samples))
    steps, collate = total_steps(train, order), step.collate(samples, layout)
    loader = Loader(samples, order, layout, layout.data_rank(context.place.rank), collate, step.at_once)
    said = [f"a step is {execution.words()}"] if context.device.type == "cuda" else []
    said += filter(None, [lack_of_tf32(train.precision, context.device), _sharing(context)])
    facts = JobFacts(
        order,
        steps,
        step.state.model.parameters,
        layout.equation() if layout.plain else f"{layout.grid()}; {layout.equation()}",
        [
            *equations(spec, order.samples, workload),
            *evaluation_lines(workload, order.samples),
            *step.state.model.groups.words(),
            *([start.match.sentence()] if start is not None and start.match is not None else []),
            *worker_words(samples),
            *said,
        ],
        pauses=Pauses.of(train, steps, order.steps_per_epoch, len(held_out.ids) if held_out else 0),
        notes={"execution": execution.words(), **worker_notes(spec, samples), **notes_of(start)},
    )
    schedule = schedule_of(train, order.seen(steps), workload)
    return GradientJob(context, workload, facts, layout, step, loader, schedule, held_out)


def _sharing(context: RunContext) -> str:
    """Said where ranks have fewer CUDA devices than they are; srun and mpirun may show each rank another one."""
    place, devices = context.place, torch.cuda.device_count() if context.device.type == "cuda" else 0
    unknown = place.launcher in ("srun", "mpirun") and devices == 1
    if unknown or not 0 < devices < place.local_world:
        return ""
    return f"{place.local_world} ranks share {devices} CUDA device{'s' * (devices > 1)}: {IN_TURNS}"


def _execution(context: RunContext, workload: Workload, samples: Samples) -> Execution:
    """What can be decided before there is a model."""
    spec, train, layout = context.spec, context.spec.train, layout_of(context.spec)
    if spec.parallel.engine != "torch":
        return Execution(compiled_layers=train.compile == "on", reason=Reason.OTHER_ENGINE)
    target = ability(context.device)
    if target.kind == "cpu":
        return execution_of(train, layout, target, Traits(workload.compile_layers))
    work = entry_of(spec.workload).work(spec, len(samples)) if train.compile == "auto" else None
    steps = total_steps(train, Order.of(train, len(samples)))
    weighed = compiling(work, steps, layout) if work else None
    return execution_of(train, layout, target, traits_of(workload, samples), weighed)


def _settled(setup: ModelSetup, samples: Samples, order: Order, steps: int) -> tuple[Step, Execution]:
    """The step, and how it runs in the end: one that could be recorded is tried first, unless its layers are compiled,
    which the workload asked for."""
    execution, layout = setup.execution, setup.layout
    if not execution.recorded or execution.compiled_layers:
        return step_of(setup), execution
    step = step_of(replace(setup, execution=Execution()))
    first = order.global_batch(0)
    if hasattr(samples, "fixed_shape_batches"):
        batch = samples.fixed_shape_batches([(first.ids, first.keys)], layout.micro_batch)[0]
    else:
        batch = samples.batch(first.ids, first.keys)
    from paceline.training.steps.capture import AT_ONCE, resident_rows
    from paceline.training.steps.probe import probe

    found = probe(step, batch)
    if found.reason is not Reason.RECORDED:
        return step, Execution(reason=found.reason, detail=found.detail)
    if execution.compiling is None and found.work is not None:
        compiles = not holds_keras(step.state.model.unwrapped)
        traits, target = Traits(few_shapes=True, compiles=compiles), ability(setup.device)
        weighed = compiling(found.work, steps, layout)
        execution = execution_of(setup.spec.train, layout, target, traits, weighed)
    recorded = recorded_step(step, execution, one_shape=not hasattr(samples, "fixed_shape_batches"))
    recorded.draws = found.draws
    if (rows := resident_rows(samples, order, steps, setup.device)) is not None:
        recorded.resident, recorded.at_once = rows, AT_ONCE
    return recorded, execution


def step_of(setup: ModelSetup, model: ParallelModel | None = None) -> Step:
    """A step as it was decided to run, of the parallel model that the setup gives, or of one that is there already."""
    workload, train, execution = setup.workload, setup.spec.train, setup.execution
    state = State.new(model or parallelize(setup), train, setup.device, workload)
    pipeline = setup.layout.pipeline > 1
    padded = pipeline or (execution.compiled_layers and workload.compile_layers)
    step = (PipelineStep if pipeline else Step)(workload, state, train, setup.timer, padded)
    return recorded_step(step, execution) if execution.recorded and not pipeline else step


def recorded_step(step: Step, execution: Execution, one_shape: bool = False) -> RecordedStep:
    """The same step, to be recorded; `one_shape` is that of samples, where batches are not brought to a few."""
    from paceline.training.steps.capture import AT_ONCE, RecordedStep

    compiled = None
    if execution.compiled_whole:
        options: dict[str, Any] = {"dynamic": False} if one_shape else {"dynamic": True, "options": compiler_options()}
        ahead.finish()
        compiled = torch.compile(step.state.model.unwrapped, **options)
    at_once = 1 if one_shape or execution.compiled_layers else AT_ONCE
    return RecordedStep(
        *(step.workload, step.state, step.train, step.timer, step.padded), at_once=at_once, compiled=compiled
    )


def compiler_options() -> dict[str, bool]:
    """Sums over rows and over columns in one kernel took more than twice as long as in two, where sizes vary."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}
