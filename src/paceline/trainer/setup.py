"""Build a rank's job: model, wrapping, optimiser, data order, and how a step runs."""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.config import Train
from paceline.config.registry import Traits, find_entry
from paceline.data.order import Order, total_steps
from paceline.data.prefetch import Collate, Loader, make_collate
from paceline.data.samples import load_training_samples, traits_of
from paceline.data.workers import describe_workers, list_worker_facts
from paceline.errors import reject_value
from paceline.execution import Execution, NoGraphReason, decide_execution, estimate_compiling
from paceline.layout import Layout
from paceline.nn.keras_backend import has_keras
from paceline.parallel.batch_layers import describe_batch_layers
from paceline.parallel.channels_last import find_convolutions, prefers_channels_last, use_channels_last
from paceline.parallel.compile import Compilation, find_equal_layers, share_compiled
from paceline.parallel.compress import LOCAL_MODES
from paceline.parallel.parallelize import ModelSetup, ParallelModel, compile_model, detect_target, parallelize
from paceline.runlog.progress import PauseSchedule
from paceline.runlog.timers import build_timer
from paceline.trainer import engines
from paceline.trainer.agreement import check_samples_agree
from paceline.trainer.context import Job, JobFacts, RunContext
from paceline.trainer.evaluation import HeldOut
from paceline.trainer.explain import SHARED_DEVICE_NOTE, describe_evaluation, list_equations, make_example
from paceline.trainer.init_from import WeightInitializer, build_initializer
from paceline.trainer.loop import FitJob, GradientJob
from paceline.trainer.optim.schedule import build_schedule
from paceline.trainer.step.step import InferredPipelineStep, PipelineStep, State, Step
from paceline.workload import BaseWorkload, LogFn, PassWorkload, Samples, Workload

if TYPE_CHECKING:
    from paceline.trainer.step.cuda_graph import RecordedStep


def build_job(context: RunContext, workload: BaseWorkload) -> Job:
    """Build the job of a workload: the only place where kinds of work differ."""
    if isinstance(workload, PassWorkload):
        return build_fit_job(context, workload)
    assert isinstance(workload, Workload)
    return build_gradient_job(context, workload)


def build_fit_job(context: RunContext, workload: PassWorkload) -> FitJob:
    workload.folder, workload.rank_info = context.folder, context.rank_info
    passes = workload.passes(context.device)
    order = Order(passes.samples, passes.samples, context.spec.train.seed)
    lines = passes.equations(context.rank_info.world)
    facts = JobFacts(order, passes.most, passes.parameters, "; ".join(lines), lines)
    return FitJob(context, workload, facts, passes)


TRIAL_SHARE = 0.5
"""Of a pass, to time formats by: what another format keeps besides must not raise the peak of the run."""


def build_gradient_job(context: RunContext, workload: Workload) -> GradientJob:
    spec, train, layout = context.spec, context.spec.train, context.layout
    samples = load_training_samples(workload)
    order = Order.of(train, samples)
    steps, held_out = total_steps(train, order), HeldOut.of(workload, order)
    reject_contradictions(workload, evaluates=held_out is not None)
    timer, execution = build_timer(context.device.type), _decide_execution(context, workload, samples, steps)
    workload.chunked_loss = execution.chunked_loss
    setup = ModelSetup(workload, spec, layout, context.device, timer, execution, context.notice)
    if (start := build_initializer(workload, context)) is not None:
        setup = replace(setup, begin=start, begins_whole=start.gives_all)
    setup = replace(setup, example=partial(make_example, samples))
    torch.manual_seed(train.seed)
    if spec.parallel.engine == "torch":
        step, execution = settle_execution(setup, samples, order, steps)
    else:
        step, execution = engines.start_engine(setup, context), setup.execution
    step.notice = context.notice
    return build_job_around(step, execution, context, samples, order, start, held_out)


def build_job_around(
    step: Step,
    execution: Execution,
    context: RunContext,
    samples: Samples,
    order: Order,
    start: WeightInitializer | None,
    held_out: HeldOut | None = None,
) -> GradientJob:
    """Build the job of an existing step: its samples in their order, its length and its schedule."""
    spec, train, layout, workload = context.spec, context.spec.train, context.layout, step.workload
    steps, collate = total_steps(train, order), step.collate(samples, layout)
    group = step.state.model.batch_layers.group
    pads_empty, data_rank = step.padded and hasattr(samples, "pads_empty"), layout.data_rank(context.rank_info.rank)
    loader = Loader(samples, order, layout, data_rank, collate, step.at_once, group, pads_empty)
    check_samples_agree(samples, order, min(steps - 1, context.checkpoint.step if context.checkpoint else 0))
    told = context.device.type == "cuda" or train.compile == "on"
    notes = [f"a step is {execution.describe()}"] if told else []
    notes += filter(None, [_describe_shared_devices(context)])
    match = None if start is None else start.match
    weights = {} if match is None else {"weights": asdict(match)}
    facts = JobFacts(
        order,
        steps,
        step.state.model.parameters,
        layout.equation() if layout.plain else f"{layout.grid()}; {layout.equation()}",
        [
            *list_equations(spec, layout, order, workload),
            *describe_evaluation(workload, order),
            *step.state.model.groups.words(),
            *describe_batch_layers(step.state.model.unwrapped, group, layout),
            *([match.sentence()] if match is not None else []),
            *describe_workers(samples),
            *([] if order.shuffled else ["samples keep the order of their stream, which every rank reads"]),
            *notes,
        ],
        pauses=PauseSchedule.of(train, steps, order.steps_per_epoch, len(held_out.ids) if held_out else 0),
        notes={"execution": execution.describe(), **list_worker_facts(spec, samples), **weights},
    )
    schedule = build_schedule(train, order.seen(steps), workload)
    return GradientJob(context, workload, facts, layout, step, loader, schedule, held_out)


def _describe_shared_devices(context: RunContext) -> str:
    """Describe devices that ranks share; srun and mpirun may show each rank another one."""
    info, devices = context.rank_info, torch.cuda.device_count() if context.device.type == "cuda" else 0
    unknown = info.launcher in ("srun", "mpirun") and devices == 1
    if unknown or not 0 < devices < info.local_world:
        return ""
    return f"{info.local_world} ranks share {devices} CUDA device{'s' * (devices > 1)}: {SHARED_DEVICE_NOTE}"


def _decide_execution(context: RunContext, workload: Workload, samples: Samples, steps: int) -> Execution:
    spec, train, layout = context.spec, context.spec.train, context.layout
    if spec.parallel.engine != "torch":
        return Execution(compiled_layers=train.compile == "on", reason=NoGraphReason.OTHER_ENGINE)
    target = detect_target(context.device)
    if target.kind == "cpu":
        return decide_execution(train, layout, target, Traits(workload.compile_layers))
    entry = find_entry(spec.workload)
    work = entry.work(spec, len(samples)) if train.compile == "auto" else None
    weighed = estimate_compiling(work, steps, layout) if work else None
    traits = traits_of(workload, samples)
    traits = replace(traits, equal_layers=traits.equal_layers or entry.traits.equal_layers)
    return decide_execution(train, layout, target, traits, weighed)


def settle_execution(setup: ModelSetup, samples: Samples, order: Order, steps: int) -> tuple[Step, Execution]:
    """Build the step and decide how it runs, by passes over a batch, without effect."""
    workload, layout, train = setup.workload, setup.layout, setup.spec.train
    known = workload.compile_layers or layout.pipeline * layout.tensor * layout.context > 1
    if setup.device.type == "cpu" or train.compile == "off" or known:
        return build_step(setup), setup.execution
    from paceline.trainer.step import probe

    step, target = build_step(replace(setup, execution=Execution())), detect_target(setup.device)
    model = step.state.model.unwrapped
    if setup.execution.recorded:
        workload.before_recording(model, samples, setup.device)
    batch, share = _first_batch(step, samples, order, layout)
    traits, weighed = _look_at_model(setup, model, samples), setup.execution.compiling
    execution = decide_execution(train, layout, target, traits, weighed)
    if weighed is None and train.compile == "auto" and execution.compiled:
        work = probe.count_work(step, batch, share)
        once = share_compiled(find_equal_layers(model) if traits.equal_layers else ())
        saved = 0.0 if _normalises_groups(step, model, layout) else work.moved_elements
        work = replace(work, operations=work.operations * once, moved_elements=saved)
        execution = decide_execution(train, layout, target, traits, estimate_compiling(work, steps, layout))
    return _apply_execution(replace(setup, execution=execution), step, samples, batch, order, steps)


def _normalises_groups(step: Step, model: nn.Module, layout: Layout) -> bool:
    """Return whether batch norms have our own kernels, faster than what is compiled."""
    rows = -(-layout.global_batch // (layout.data * layout.passes(layout.global_batch)))
    batch_layers = step.state.model.batch_layers
    return bool(batch_layers.norms) and rows > batch_layers.group and prefers_channels_last(model)


def _apply_execution(
    setup: ModelSetup, step: Step, samples: Samples, batch: Any, order: Order, steps: int
) -> tuple[Step, Execution]:
    """Compile, find out whether the step can be recorded, and choose a memory format."""
    from paceline.trainer.step import probe
    from paceline.trainer.step.cuda_graph import AT_ONCE, load_resident_rows

    execution, model, compilation = setup.execution, step.state.model.unwrapped, None
    padded, one_shape = hasattr(samples, "padded"), not hasattr(samples, "fixed_shape_batches")
    if execution.compiled_layers:
        compilation = compile_model(model, setup, dynamic=None if padded or one_shape else True)
        step.padded = padded
    found = probe.probe_step(step, batch) if execution.recorded else probe.ProbeResult(execution.reason)
    if execution.recorded and found.reason is not NoGraphReason.RECORDED:
        compiles = execution.compiled_whole and setup.spec.train.compile == "on"
        execution = replace(execution, recorded=False, reason=found.reason, detail=found.detail)
        execution = replace(execution, compiled_whole=False, compiled_layers=execution.compiled_layers or compiles)
        if compiles:
            compile_model(model, setup)
    if not execution.compiled and find_convolutions(model):
        if setup.layout.ranks == 1:
            some, _ = _first_batch(step, samples, order, setup.layout, TRIAL_SHARE)
            last = probe.measure_channels_last(step, some, execution.recorded)
        else:
            last = prefers_channels_last(model)
        execution = replace(execution, channels_last=last)
        if last:
            use_channels_last(model)
    execution = replace(execution, chunked_loss=setup.workload.chunked_loss)
    if not execution.recorded:
        return step, execution
    recorded = build_recorded_step(step, execution, setup.notice, one_shape, compilation)
    recorded.draws = found.draws
    if (rows := load_resident_rows(samples, order, steps, setup.device, setup.spec.train.precision)) is not None:
        recorded.resident, recorded.at_once = rows, AT_ONCE
    return recorded, execution


def _look_at_model(setup: ModelSetup, model: nn.Module, samples: Samples) -> Traits:
    """Return the traits of the work with what only the model shows."""
    entry = find_entry(setup.spec.workload)
    equal = (entry.traits.equal_layers or not entry.subject) and bool(find_equal_layers(model))
    return replace(traits_of(setup.workload, samples), equal_layers=equal, compiles=not has_keras(model))


def _first_batch(step: Step, samples: Samples, order: Order, layout: Layout, share: float = 1.0) -> tuple[Any, float]:
    """Return as much of the first batch as a rank gets in one pass, or a share of it; and how many of it a step is."""
    first = order.global_batch(0)
    rows = -(-len(first.ids) // (layout.data * layout.passes(layout.global_batch)))
    rows = min(rows, max(2, math.ceil(share * rows)))  # of one sample, batch norm may have nothing to average
    make: Collate = make_collate(samples.batch)
    if fixed := hasattr(samples, "fixed_shape_batches"):
        make = partial(samples.fixed_shape_batches, most=layout.micro_batch)
    make = step.with_keys(make, layout.micro_batch if fixed else 0)
    return make([(first.ids[:rows], first.keys[:rows])])[0], len(first.ids) / rows


def build_step(setup: ModelSetup, model: ParallelModel | None = None) -> Step:
    """Build a step as it was decided to run, of an existing model or that of the setup."""
    workload, train, execution = setup.workload, setup.spec.train, setup.execution
    state = State.new(model or parallelize(setup), train, setup.device, workload)
    pipeline = setup.layout.pipeline > 1
    inferred = pipeline and not workload.has("stage")
    padded = (pipeline and not inferred) or (execution.compiled_layers and workload.compile_layers)
    kind = InferredPipelineStep if inferred else PipelineStep if pipeline else Step
    step = kind(workload, state, train, setup.timer, padded)
    return build_recorded_step(step, execution, setup.notice) if execution.recorded and not pipeline else step


def build_recorded_step(
    step: Step,
    execution: Execution,
    notice: LogFn,
    one_shape: bool = False,
    compilation: Compilation | None = None,
) -> "RecordedStep":
    """Build the same step, to be recorded; `one_shape`: batches are not padded to a few."""
    from paceline.trainer.step.cuda_graph import AT_ONCE, RecordedStep

    compiled = None
    if execution.compiled_whole:
        model, compilation = step.state.model.unwrapped, Compilation(notice)
        options: dict[str, Any] = {} if one_shape else {"options": get_compiler_options()}
        compiled = compilation.wrap(model, dynamic=not one_shape, **options)
    at_once = 1 if one_shape or execution.compiled_layers else AT_ONCE
    parts = step.workload, step.state, step.train, step.timer, step.padded, at_once
    return RecordedStep(*parts, compiled=compiled, compilation=compilation)


def get_compiler_options() -> dict[str, bool]:
    """Return options that keep sums over rows and columns in two kernels: one took twice as long."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}


REPLACED_KEYS = {
    "optimizer": ("optimizer", "eps", "nesterov", "optimizer_state", "weights"),
    "schedule": ("schedule", "warmup", "warmup_steps", "warmup_from", "warmup_shape", "final_lr"),
}
"""Methods of a workload, and the keys of `train` that they replace."""


def reject_contradictions(workload: Workload, evaluates: bool) -> None:
    """Raise UserError if keys contradict the workload or each other."""
    train, parallel, reasons = workload.spec.train, workload.spec.parallel, {}
    if train.patience and not evaluates:
        reasons["patience"] = "data('test') gives no samples to evaluate on; hold some out, or use train.patience=0"
    for method, keys in REPLACED_KEYS.items():
        for key in keys if workload.has(method) else ():
            if getattr(train, key) != getattr(Train(), key):
                reasons[key] = f"{type(workload).__name__} has its own method {method}; leave out one of the two"
    if train.ema and parallel.reduce in LOCAL_MODES:
        each = f"with parallel.reduce={parallel.reduce} each rank trains its own model"
        reasons["ema"] = f"{each}; use parallel.reduce=exact, or leave train.ema out"
    if train.checkpoint_every == "auto" and parallel.reduce in LOCAL_MODES:
        each = f"with parallel.reduce={parallel.reduce} models are joined for each checkpoint, which changes the answer"
        reasons["checkpoint_every"] = f"{each}; give a number of steps"
    for key, reason in reasons.items():
        raise reject_value(f"train.{key}", getattr(train, key), reason, "conflict")
