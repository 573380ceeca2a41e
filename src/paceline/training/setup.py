"""Building a rank's job of training: model, wrapping, optimiser, data order, and how a step runs."""

from __future__ import annotations

import torch

from paceline.data.order import Order, total_steps
from paceline.data.prefetch import Loader
from paceline.execution import Execution, Reason, Traits, execution_of
from paceline.layout import layout_of
from paceline.parallel.wrapping import ability, parallelize
from paceline.record.timers import CollectiveTimer, timer_of
from paceline.spec import Train
from paceline.training import engines
from paceline.training.context import RunContext
from paceline.training.loop import GradientJob
from paceline.training.schedule import schedule_of
from paceline.training.state import State
from paceline.training.step import PipelineStep, Step
from paceline.workload import Workload, samples_of


def gradient_job(context: RunContext, workload: Workload) -> GradientJob:
    spec, device = context.spec, context.device
    train, layout = spec.train, layout_of(spec)
    samples = samples_of(workload)
    order = Order(len(samples), train.global_batch, train.seed)
    steps = total_steps(train, order)
    timer = timer_of(device.type)
    torch.manual_seed(train.seed)
    if spec.parallel.engine == "torch":
        traits = Traits(equal_layers=workload.compile_layers, few_shapes=hasattr(samples, "steady"))
        execution = execution_of(train, layout, ability(device), traits)
        model = parallelize(workload, spec, layout, device, timer, execution)
        step = step_of(workload, State.new(model, train, device), train, timer, execution, layout.pipeline > 1)
    else:
        execution = Execution(compiled_layers=train.compile == "on", reason=Reason.OTHER_ENGINE)
        step = engines.start(context, workload, layout, timer, execution)
    loader = Loader(
        samples, order, layout, layout.data_rank(context.place.rank), step.collate(samples, layout), step.at_once
    )
    schedule = schedule_of(train, order.seen(steps))
    return GradientJob(context, workload, layout, execution, step, loader, steps, schedule)


def step_of(
    workload: Workload, state: State, train: Train, timer: CollectiveTimer, execution: Execution, pipeline: bool
) -> Step:
    """The step as it was decided to run; `pipeline`: through the stages of one."""
    padded = pipeline or (execution.compiled_layers and workload.compile_layers)
    if pipeline:
        return PipelineStep(workload, state, train, timer, padded)
    if not execution.recorded:
        return Step(workload, state, train, timer, padded)
    from paceline.training.capture import AT_ONCE, RecordedStep

    net = state.model.unwrapped
    if execution.compiled_whole:
        compiled = torch.compile(net, dynamic=True, options=compiler_options())
        return RecordedStep(workload, state, train, timer, padded, AT_ONCE, compiled=compiled)
    return RecordedStep(workload, state, train, timer, padded, compiled=net)


def compiler_options() -> dict[str, bool]:
    """Sums over rows and over columns in one kernel took more than twice as long as in two, where sizes vary."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}
