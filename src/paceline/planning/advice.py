"""What to do, in plain words; every number in them is priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.layout import Layout
from paceline.planning.candidates import MEMORY_BAND, Limits, Price
from paceline.planning.formulas.placement import Reduction
from paceline.planning.search import search
from paceline.record.units import duration, percent, size

if TYPE_CHECKING:
    from paceline.planning.plan import Plan, PlannedRow
    from paceline.planning.subject import Subject
    from paceline.planning.training import TrainingSubject

PAYS = 1.1
"""Speed-up from which more devices are said to pay."""
BATCHES = (2, 4, 8, 16, 32)
LOCAL_STEPS = 8


def nothing_fits(plan: Plan) -> Iterator[str]:
    last = plan.out[-1] if plan.out else None
    device = plan.site.whole.device
    if last is None or not last.refused:
        yield "No layout is possible on these devices."
        return
    near = min((r for r in last.refused if r.over_bytes), key=lambda r: r.over_bytes, default=last.refused[0])
    yield f"Nothing fits on {last.devices} × {device.name}. Nearest is {near.family}: {near.reason}."
    yield plan.subject.wording.to_fit


def advise_training(subject: TrainingSubject, plan: Plan) -> Iterator[str]:
    """Whether more devices pay, and what would be faster or give room."""
    assert plan.chosen is not None
    assert plan.base is not None
    chosen, most = plan.chosen, plan.rows[-1]
    if _misses_memory(subject, plan):
        yield _too_large(plan, plan.base)
    if most.devices == 1:
        yield f"One device: a step of {subject.global_batch:,} samples takes {duration(most.price.step_s)}."
    elif most.efficiency < 0.5:
        yield _does_not_pay(subject, plan, most)
    else:
        yield _pays(subject, chosen, plan.base)
    yield from _computes_longer(subject, plan.base, most.price, plan.site.shared)
    if chosen.price.tight:
        yield (
            f"Memory is tight: {size(chosen.price.memory.total_bytes)} of {size(chosen.price.capacity_bytes)} are "
            f"foreseen, and the estimate may be {percent(MEMORY_BAND)} off. "
            "parallel.micro_batch or parallel.checkpointing give room."
        )
    if chosen.price.waits_for_data:
        yield (
            f"Input is the bottleneck: a step waits {duration(chosen.price.time.data_s)} for it. "
            "Store samples smaller, or keep them in memory."
        )
    yield from _types(subject, chosen.price)


def over(subject: Subject, base: Price) -> str:
    """What speed-ups are counted from, by its name."""
    layout = subject.layout_name(base).replace(" *", ", states in host memory")
    return "one device" if layout == "single" else f"{_few(base.devices)} ({layout})"


def _named(subject: Subject, price: Price) -> str:
    return subject.layout_name(price).removesuffix(" *")


def _misses_memory(subject: TrainingSubject, plan: Plan) -> bool:
    """Whether one device is too small, and not only other than what the run file insists on."""
    assert plan.base is not None
    if plan.base.devices == 1 and not plan.base.layout.offload:
        return False
    alone = search(replace(subject, context=1), 1, plan.site.at(1), Limits()).chosen
    return alone is None or alone.layout.offload


def _pays(subject: TrainingSubject, chosen: PlannedRow, base: Price) -> str:
    p, n = chosen.price, chosen.devices
    name = _named(subject, p)
    if n == 1:
        return f"Take one device: a step takes {duration(p.step_s)}."
    if n == base.devices:
        return f"{name} on {n} devices: a step takes {duration(p.step_s)}."
    hidden = p.time.comm_s - p.time.exposed_s
    travel = f"communicates {duration(p.time.comm_s)}"
    if hidden > 0.1 * p.time.comm_s:
        travel += f", of which {hidden / p.time.comm_s:.0%} hide behind the arithmetic".replace("%", " %")
    return (
        f"{name} on {n} devices will run at {times(chosen.speedup)} the speed of {over(subject, base)}: "
        f"each step computes {duration(p.time.compute_s)} and {travel}."
    )


def _computes_longer(subject: TrainingSubject, base: Price, most: Price, shared: bool) -> Iterator[str]:
    """Why more devices compute for longer, where they do."""
    if most.devices == base.devices or most.time.compute_s <= base.time.compute_s:
        return
    alone, together = (subject.placement(p.layout, p.where.cluster.device).runtime for p in (base, most))
    longer = f"Each of {most.devices} devices computes {duration(most.time.compute_s)} in a step, and "
    longer += f"{over(subject, base)} {duration(base.time.compute_s)}"
    if shared:
        yield f"{longer}: ranks share the cores of one machine."
    elif alone.one_graph and not together.one_graph:
        yield (
            f"{longer}: one device replays its step as one CUDA graph, and with several the host launches every "
            "kernel, because collectives stay outside of graphs; so small a step is mostly launches."
        )
    else:
        yield f"{longer}: so small a part of the batch is mostly launches, which do not shrink with it."


def _does_not_pay(subject: TrainingSubject, plan: Plan, most: PlannedRow) -> str:
    """The case that people find out by burning hours: what it would run at, why, and what would help instead."""
    p, n = most.price, most.devices
    name = _named(subject, p)
    assert plan.base is not None
    said = f"{name} on {n} devices will run at {times(most.speedup)} the speed of {over(subject, plan.base)}: "
    said += f"each step computes {duration(p.time.compute_s)}"
    fixed = p.time.update_s + p.time.overhead_s
    if p.time.exposed_s >= fixed:
        said += f" and communicates {duration(p.time.comm_s)}"
    else:
        said += f", communicates {duration(p.time.comm_s)} and spends {duration(fixed)} on launches and the update"
    if plan.base.step_s < p.time.compute_s:
        said += f"; {_few(plan.base.devices)} need{'s' * (plan.base.devices == 1)} "
        said += f"{duration(plan.base.step_s)} in all"
    assert plan.chosen is not None
    chosen, knee, ways = plan.chosen, plan.choice.knee, list[str]()
    if chosen.devices < n:
        alone = chosen.devices == 1
        ways = ["stay on one device" if alone else f"use {chosen.devices} devices ({times(chosen.speedup)})"]
    elif knee is not None and knee.devices < n:
        said += f". That is the fastest; {_few(knee.devices)} ({times(knee.speedup)}) have the least time × money"
    ways += [*_raised(subject, most, plan.base), *_looser(subject, plan.base, most)]
    do = ", or ".join(ways)
    return f"{said}. {do[0].upper()}{do[1:]}." if do else f"{said}."


def _few(devices: int) -> str:
    return "one device" if devices == 1 else f"{devices:,} devices"


def _raised(subject: TrainingSubject, most: PlannedRow, base: Price) -> Iterator[str]:
    """The smallest larger batch with which as many devices are worth it, else the best of those tried."""
    tried = []
    for factor in BATCHES:
        batch = subject.global_batch * factor
        larger = replace(subject, global_batch=batch, reduction=Reduction())
        together = _at_batch(larger, most.price, batch)
        alone = _at_batch(larger, base, batch)
        if not together.fits or not alone.fits:
            break
        tried.append((alone.step_s / together.step_s, batch))
    good = [(speedup, batch) for speedup, batch in tried if speedup * base.devices >= 0.5 * most.devices]
    best = good[0] if good else max(tried, default=None)
    if best is not None and best[0] > max(PAYS, 1.2 * most.speedup):
        yield f"raise the batch to {best[1]:,} ({times(best[0])})"


def _at_batch(subject: TrainingSubject, of: Price, batch: int) -> Price:
    """The same kind of layout with another batch, in as many passes as fit."""
    layout: Layout = replace(of.layout, global_batch=batch, micro_batch=-(-batch // of.layout.data))
    found = subject.price(layout, of.where)
    while not found.fits and layout.micro_batch > 1:
        layout = replace(layout, micro_batch=-(-layout.micro_batch // 2))
        found = subject.price(layout, of.where)
    return found


def _looser(subject: TrainingSubject, base: Price, most: PlannedRow) -> Iterator[str]:
    """Ways to send less, where ranks hold the whole model; they change the answer, and say so."""
    whole = [p for p in most.found.prices if p.layout.plain]
    if not whole:
        return
    layout, where = whole[0].layout, most.price.where
    for reduction, words in (
        (Reduction("local_sgd", LOCAL_STEPS), f"use local SGD every {LOCAL_STEPS} steps"),
        (Reduction("bf16"), "send gradients in bf16"),
    ):
        speedup = base.step_s / replace(subject, reduction=reduction).price(layout, where).step_s
        if speedup > max(PAYS, 1.15 * most.speedup):
            yield f"{words} ({times(speedup)})"


def _too_large(plan: Plan, base: Price) -> str:
    numbers = plan.subject.numbers
    states = plan.subject.stored_params * numbers.weight_bytes
    states += plan.subject.trained_params * (numbers.gradient_bytes + numbers.state_bytes)
    where, n = plan.site.at(1).cluster.device, base.devices
    said = f"It does not fit on one {where.name}"
    if plan.rows[0].devices == 1:  # its states in host memory
        said = f"It fits on one {where.name} only with its states in host memory"
    rest = f" of {size(where.memory_bytes)}"
    if states <= where.memory_bytes:
        rest = ", and activations do not fit beside them"
    host = f" and {size(base.memory.host_bytes)} of host memory" if base.layout.offload else ""
    least = f"{_named(plan.subject, base)} on {_few(n)} needs {size(base.memory.total_bytes)}{host} on each."
    return f"{said}: weights, gradients and optimiser states take {size(states)}{rest}. {least}"


def _types(subject: TrainingSubject, chosen: Price) -> Iterator[str]:
    """Another type of the products, where the device is much faster in it or lacks the one asked for."""
    device, precision = chosen.where.cluster.device, subject.train.precision
    if device.synchronous:
        return
    if precision == "bf16" and "bf16" not in device.flops_s and "fp16" in device.flops_s:
        yield f"{device.name} has no bf16 units: the plan is for fp16, so use train.precision=fp16."
        return
    half = "bf16" if "bf16" in device.flops_s else "fp16"
    if precision not in ("fp32", "fp64") or half not in device.flops_s:
        return
    other = replace(subject.in_precision(half), reduction=Reduction())
    gain = chosen.step_s / other.price(chosen.layout, chosen.where).step_s
    if gain > 1.15:
        yield f"train.precision={half} would make a step {times(gain)} as fast."


def times(ratio: float) -> str:
    return f"{ratio:.2g}×" if ratio < 9.95 else f"{ratio:.0f}×"
