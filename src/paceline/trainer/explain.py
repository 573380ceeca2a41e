"""The verb `explain`: every value of a run, its unit, its origin, and what follows from it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import DEFAULT, RunSpec, Section
from paceline.config.registry import RECORDED_ENTRY, is_script
from paceline.errors import join_names
from paceline.execution import CPU, CUDA, decide_execution, estimate_compiling
from paceline.io.table import Table
from paceline.launch import network
from paceline.launch.environment import LOCALHOST, RankInfo, detect_rank
from paceline.layout import Layout, layout_of
from paceline.trainer.optim.schedule import count_warmup_samples, scale_lr
from paceline.workload import BaseWorkload, Samples, Workload

if TYPE_CHECKING:
    from paceline.data.order import Order

SHARED_DEVICE_NOTE = "they take turns, and messages go through host memory, with the same answer"
EXAMPLE_SAMPLES = 2
USER_MODEL_NOTE = "samples have one shape and the model never waits for the device, and compiled, if that saves time"


def derive_facts(spec: RunSpec, workload: BaseWorkload | None = None, samples: int | None = None) -> list[str]:
    """List what follows from the values of a run, and from its data if they are known."""
    layout, order = layout_of(spec), None
    if samples is not None:
        from paceline.data.order import Order  # imports numpy

        order = Order.of(spec.train, samples)
    lines = list_equations(spec, layout, order, workload)
    if workload is not None and order is not None:
        lines += [*describe_evaluation(workload, order), *describe_model(workload, layout)]
        lines += describe_division(workload, layout)
    return [*lines, *describe_exchange(layout), *describe_execution(spec, layout, order), *describe_network(spec)]


def list_equations(
    spec: RunSpec, layout: Layout, order: "Order | None" = None, workload: BaseWorkload | None = None
) -> list[str]:
    """List the derived numbers, each as the equation that gives it."""
    train = spec.train
    if spec.entry is RECORDED_ENTRY:
        return [f"{spec.workload} is not executed to look at a run: what follows from its code is not shown"]
    if not spec.entry.batched:
        return [] if order is None else [describe_sharing(order.samples, layout.ranks, "samples")]
    lines = [] if layout.plain else [layout.grid()]
    lines.append(layout.equation())
    if not is_script(spec.workload) or spec.origin("train.lr") != DEFAULT:  # else the script may have its own
        lines.append(scale_lr(train)[1])
    if order is None:
        return lines
    from paceline.data.order import total_steps

    samples, steps = order.samples, total_steps(train, order)
    total = order.seen(steps)
    if order.growth:
        whole = "of a global batch of " + ", ".join(f"{size} after {first} steps" for first, size in order.growth)
    else:
        whole = f"× {order.steps_per_epoch} steps"
        tail = samples - order.seen(order.steps_per_epoch - 1)
        last = "" if tail == train.global_batch else f", the last of {tail}"
        lines.append(f"{order.steps_per_epoch} steps per epoch = {samples} samples / {train.global_batch} global{last}")
    epochs = f"{total / samples:.3g}" if train.steps else str(train.epochs or 1)
    epochs += " epoch" if epochs == "1" else " epochs"
    length = f"{epochs} = {total} samples in {steps} steps"
    by_epochs = length if train.steps else f"{steps} steps = {epochs} {whole}"
    lines.append(f"{length}, {whole}" if order.growth else by_epochs)
    if isinstance(workload, Workload) and workload.has("schedule"):
        lines.append(f"the learning rate is the peak × {type(workload).__name__}.schedule(samples seen, {total})")
    elif train.warmup_steps is not None:
        equation = f"{train.warmup_steps} steps" + f" × {train.global_batch} global" * (not order.growth)
        lines.append(f"{count_warmup_samples(train, total):.0f} samples warm-up = {equation}")
    elif train.warmup:
        lines.append(f"{total * train.warmup:.0f} samples warm-up = {train.warmup:g} × {total} samples")
    return lines


def describe_model(workload: BaseWorkload, layout: Layout) -> list[str]:
    """Build the model; count the parameters of each group, and state the groups of batch norm."""
    if not isinstance(workload, Workload) or is_script(workload.spec.workload):
        return []
    import torch

    from paceline.nn.batch_norm import list_batch_norms
    from paceline.parallel.batch_layers import convert_batch_layers, describe_batch_layers
    from paceline.parallel.parameters import resolve_groups

    train, device = workload.spec.train, torch.device("meta")
    with device if workload.draws_by_name else torch.device("cpu"):
        model = workload.model()
    grouped = train.groups or workload.has("groups")
    lines = list(resolve_groups(workload, train, model).words()) if grouped else []
    convert_batch_layers(model, workload.spec, layout, device)
    norms = list_batch_norms([model])
    return lines + describe_batch_layers(model, norms[0].group if norms else 1, layout)


def describe_division(workload: BaseWorkload, layout: Layout) -> list[str]:
    """Describe how layers without rules are divided; raise UserError if they cannot be."""
    if not isinstance(workload, Workload) or layout.tensor * layout.pipeline == 1:
        return []
    if workload.shard_rules and workload.has("stage"):
        return []
    import torch

    from paceline.data.samples import load_training_samples
    from paceline.parallel.parallelize import infer_division

    with torch.device("meta" if workload.draws_by_name else "cpu"):
        model = workload.model()
    samples = load_training_samples(workload)
    return [found.words() for found in infer_division(workload, model, lambda: make_example(samples), layout) if found]


def make_example(samples: Samples) -> Any:
    """Return a small batch, for what is found out by running a model once."""
    import numpy as np

    few = np.arange(min(EXAMPLE_SAMPLES, len(samples)))
    return samples.batch(few, few)


def describe_exchange(layout: Layout) -> list[str]:
    """Describe how the ranks that divide a sequence see each other's keys and values."""
    if layout.context == 1:
        return []
    how = "passed round; those of attention with a mask, or in fp32 on CUDA devices, are gathered"
    if not layout.ring:
        how = f"gathered; parallel.context={layout.context}:ring passes them round"
    return [f"keys and values of {layout.context} ranks are {how}"]


def describe_evaluation(workload: BaseWorkload, order: "Order") -> list[str]:
    """Describe how much of the held-out split is evaluated during a run."""
    from paceline.data.order import describe_subset
    from paceline.data.samples import samples_of

    if not isinstance(workload, Workload) or (held_out := samples_of(workload, "test")) is None:
        return []
    return [describe_subset(workload.spec.train, order, len(held_out), workload.evaluation_chunk)]


def describe_execution(spec: RunSpec, layout: Layout, order: "Order | None" = None) -> list[str]:
    """Describe how a step runs and why, on the kinds of device that the run may be given."""
    entry, train, parallel = spec.entry, spec.train, spec.parallel
    if entry is RECORDED_ENTRY or not entry.batched:
        return []
    lines = []
    if parallel.device != "cuda":
        lines.append(f"on CPU cores a step is {decide_execution(train, layout, CPU, entry.traits).describe()}")
    if parallel.device != "cpu":
        execution = decide_execution(train, layout, CUDA, entry.traits)
        weighs = execution.compiled and train.compile == "auto"
        if weighs and (work := entry.work(spec, order.samples if order else None)) is not None:
            steps = train.steps or (order.first_step(train.epochs or 1) if order else None)
            execution = decide_execution(train, layout, CUDA, entry.traits, estimate_compiling(work, steps, layout))
        user_model = execution.recorded and not entry.subject  # is known only when it has run
        words = f"recorded as one CUDA graph, if {USER_MODEL_NOTE}" if user_model else execution.describe()
        lines.append(f"on a CUDA device a step is {words}")
        if parallel.backend == "gloo" and layout.ranks > 1:
            few = f"of {layout.ranks} ranks, those beyond the CUDA devices of a machine share them"
            lines.append(f"{few}: {SHARED_DEVICE_NOTE}")
    return lines


def describe_network(spec: RunSpec) -> list[str]:
    """Describe what is chosen for the messages between ranks, and why."""
    ranks = spec.parallel.ranks
    rank_info = detect_rank(os.environ) or RankInfo(0, ranks, 0, ranks, "paceline", LOCALHOST, 0)
    if rank_info.world == 1:
        return []
    cuda = spec.parallel.device == "cuda" or (spec.parallel.device == "auto" and any(Path("/dev").glob("nvidia[0-9]")))
    lines = [str(setting) for setting in network.choose_network_settings(rank_info, os.environ, cuda)]
    if cuda and (ports := network.list_active_infiniband()):
        lines.append(f"{join_names(ports)} of InfiniBand or RoCE: NCCL uses them")
    return lines


def describe_sharing(samples: int, ranks: int, called: str) -> str:
    """Describe how ranks share a fit: equal parts of all samples in every pass."""
    sign = "=" if samples % ranks == 0 else "≈"
    return f"{samples:,} {called} {sign} {-(-samples // ranks):,} per rank × {ranks} rank{'s' * (ranks > 1)}"


def list_values(spec: RunSpec) -> list[dict[str, Any]]:
    """List every value with its key, its unit and where it came from, as plain data."""
    return [{"key": k, "value": v, "unit": unit, "from": spec.origin(k)} for k, v, unit, _ in spec.fields()]


def build_value_table(spec: RunSpec, defaults: bool = False) -> Table:
    """Build a table of the values that were given; of all values with `defaults`."""
    table = Table("key", "value", "unit", "from", left=4)
    for key, value, unit, _ in spec.fields():
        origin = spec.origin(key)
        if defaults or origin != DEFAULT or key in ("name", "workload"):
            table.add_row(key, _format_value(value), unit, origin, style="dim" if origin == DEFAULT else "")
    return table


def _format_value(value: Any) -> str:
    match value:
        case None | ():
            return "-"
        case tuple():
            return ", ".join(map(str, value))
        case dict():
            return ", ".join(f"{key}: {_format_value(inner)}" for key, inner in value.items()) or "-"
        case Section():
            return f"{{{_format_value(value.model_dump(exclude_defaults=True))}}}"
    return str(value)
