"""The verb `explain`: every value of a run, its unit and where it came from, and what follows from them."""

from __future__ import annotations

from typing import Any

from paceline.data.samples import samples_of
from paceline.execution import CPU, CUDA, execution_of
from paceline.layout import layout_of
from paceline.registry import entry_of
from paceline.spec import RunSpec
from paceline.training.schedule import scaled_lr
from paceline.workload import BaseWorkload, Workload


def equations(spec: RunSpec, samples: int | None) -> list[str]:
    """The derived numbers, each as the equation that gives it."""
    train, layout = spec.train, layout_of(spec)
    if not entry_of(spec.workload).batched:
        return [] if samples is None else [shared_documents(samples, layout.ranks)]
    lines = [] if layout.plain else [layout.grid()]
    lines += [layout.equation(), scaled_lr(train)[1]]
    if samples is None:
        return lines
    from paceline.data.order import Order, total_steps

    order = Order(samples, train.global_batch, train.seed)
    steps = total_steps(train, order)
    total = order.seen(steps)
    tail = samples - order.seen(order.steps_per_epoch - 1)
    last = "" if tail == train.global_batch else f", the last of {tail}"
    lines.append(f"{order.steps_per_epoch} steps per epoch = {samples} samples / {train.global_batch} global{last}")
    if train.steps:
        lines.append(f"{total / samples:.3g} epochs = {total} samples in {steps} steps")
    else:
        lines.append(f"{steps} steps = {train.epochs or 1} epochs × {order.steps_per_epoch} steps")
    if train.warmup:
        lines.append(f"{total * train.warmup:.0f} samples warm-up = {train.warmup:g} × {total} samples")
    return lines


def group_lines(workload: BaseWorkload) -> list[str]:
    """How many parameters each group has; the model is built, where there are groups."""
    train = workload.spec.train
    if not isinstance(workload, Workload) or not (train.groups or workload.has("groups")):
        return []
    from paceline.parallel.groups import groups_of

    return list(groups_of(workload, train, workload.model()).words())


def evaluation_lines(workload: BaseWorkload, samples: int) -> list[str]:
    """How much of the held-out split is evaluated during a run."""
    if not isinstance(workload, Workload) or not (held_out := samples_of(workload, "test")):
        return []
    from paceline.data.held_out import equation
    from paceline.data.order import Order

    train = workload.spec.train
    order = Order(samples, train.global_batch, train.seed)
    return [equation(train, order, len(held_out), workload.evaluation_chunk)]


def execution_lines(spec: RunSpec) -> list[str]:
    """How a step runs and why, on the kinds of device that the run may be given."""
    entry = entry_of(spec.workload)
    if not entry.batched:
        return []
    layout, traits = layout_of(spec), entry.traits
    kinds = {"cpu": "CPU cores", "cuda": "a CUDA device"}
    wanted = [kind for kind in (CPU, CUDA) if spec.parallel.device in ("auto", kind.kind)]
    return [
        f"on {kinds[device.kind]} a step is {execution_of(spec.train, layout, device, traits).words()}"
        for device in wanted
    ]


def shared_documents(documents: int, ranks: int) -> str:
    """A fit has no batches: every pass goes through all documents, of which ranks take equal parts."""
    sign = "=" if documents % ranks == 0 else "≈"
    return f"{documents:,} documents {sign} {-(-documents // ranks):,} per rank × {ranks} rank{'s' * (ranks > 1)}"


def explain(spec: RunSpec) -> Any:
    """A table of all values for rich to print."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "value", "unit", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    section = ""
    for key, value, unit, _ in spec.fields():
        head = key.split(".")[0] if "." in key else ""
        if head != section:
            table.add_section()
            section = head
        origin = spec.origin(key)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        style = "dim" if origin == "default" else ""
        table.add_row(key, "-" if value is None or value == () else shown, unit, origin, style=style)
    return table
