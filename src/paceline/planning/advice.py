"""What to do, in plain words; every number in them is priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.layout import Layout
from paceline.planning.candidates import family_name
from paceline.planning.formulas.spread import NUMBERS
from paceline.planning.passtime import PassMemory
from paceline.planning.price import MEMORY_BAND, Price, Ways, price
from paceline.planning.subject import TYPES, Subject
from paceline.record.units import duration, percent, size

if TYPE_CHECKING:
    from paceline.planning.money import Row
    from paceline.planning.plan import Plan

PAYS = 1.1
"""Speed-up from which more devices are said to pay."""
LOST = 0.9
"""Speed-up below which they are said to slow a run down."""
BATCHES = (2, 4, 8, 16, 32)
LOCAL_STEPS = 8


def advise(plan: Plan) -> Iterator[str]:
    if plan.chosen is None:
        yield from _nothing_fits(plan)
        return
    chosen, most = plan.chosen, plan.rows[-1]
    if plan.subject.counts is not None:
        yield from _of_passes(plan, chosen, most)
        return
    if not plan.alone_fits:
        yield _too_large(plan)
    if most.devices == 1:
        yield _one(plan)
    elif most.efficiency < 0.5:
        yield _does_not_pay(plan, most)
    else:
        yield _pays(chosen)
    if chosen.price.tight:
        yield (
            f"Memory is tight: {size(chosen.price.memory.total_bytes)} of {size(chosen.price.capacity_bytes)} are "
            f"foreseen, and the estimate may be {percent(MEMORY_BAND)} off. "
            "parallel.micro_batch or parallel.checkpointing give room."
        )
    if chosen.price.time.data_s > 0.05 * chosen.price.step_s:
        yield (
            f"Input is the bottleneck: a step waits {_ms(chosen.price.time.data_s)} for it. "
            "Store samples smaller, or keep them in memory."
        )
    yield from _types(plan, chosen)


def _of_passes(plan: Plan, chosen: Row, most: Row) -> Iterator[str]:
    """Of a topic model: whether more devices pay, and what the passes wait for."""
    counts, p = plan.subject.counts, chosen.price
    assert counts is not None
    assert isinstance(p.memory, PassMemory)
    if most.devices == 1:
        yield f"One device: a pass over all documents takes {_ms(p.step_s)}."
    elif chosen.devices == 1:
        slow = most.price.time
        yield (
            f"Stay on one device, where a pass takes {_ms(p.step_s)}: {most.devices} would run at "
            f"{_times(most.speedup)}. Each would work {_ms(slow.compute_s)} and spend "
            f"{_ms(slow.comm_s + slow.update_s + slow.overhead_s)} on what does not shrink: sums over ranks, topics, "
            "launches."
        )
    else:
        yield (
            f"{chosen.devices} devices will run at {_times(chosen.speedup)}: in each pass one reads "
            f"{size(counts.documents * counts.document_bytes / chosen.devices)} of counts, works "
            f"{_ms(p.time.compute_s)}, and adds up {size(4.0 * counts.k * counts.terms)} with the others in "
            f"{_ms(p.time.comm_s)}."
        )
    if p.time.data_s > 0.05 * p.step_s:
        where = "disk" if p.memory.disk_bytes else "host memory"
        amount = size(p.memory.disk_bytes or p.memory.host_bytes)
        yield (
            f"Counts do not fit: {amount} of each rank come from {where} in every pass, which waits "
            f"{_ms(p.time.data_s)} for them. More devices hold more; compact shards are smaller to read than .npy."
        )


def _one(plan: Plan) -> str:
    p = plan.alone
    return f"One device: a step of {plan.subject.global_batch:,} samples takes {_ms(p.step_s)}."


def _pays(chosen: Row) -> str:
    p, n = chosen.price, chosen.devices
    name = family_name(p.layout)
    if n == 1:
        return f"One device is the best choice: a step takes {_ms(p.step_s)}."
    hidden = p.time.comm_s - p.time.exposed_s
    travel = f"communicates {_ms(p.time.comm_s)}"
    if hidden > 0.1 * p.time.comm_s:
        travel += f", of which {hidden / p.time.comm_s:.0%} hide behind the arithmetic".replace("%", " %")
    return (
        f"{name} on {n} devices will run at {_times(chosen.speedup)}: "
        f"each step computes {_ms(p.time.compute_s)} and {travel}."
    )


def _does_not_pay(plan: Plan, most: Row) -> str:
    """The case that people find out by burning hours: what it would run at, why, and what would help instead."""
    p, n = most.price, most.devices
    name = family_name(p.layout)
    said = f"{name} on {n} devices will run at {_times(most.speedup)}: each step computes {_ms(p.time.compute_s)}"
    fixed = p.time.update_s + p.time.overhead_s
    if p.time.exposed_s >= fixed:
        said += f" and communicates {_ms(p.time.comm_s)}"
    else:
        said += f", communicates {_ms(p.time.comm_s)} and spends {_ms(fixed)} on launches and the update"
    if plan.alone.step_s < p.time.compute_s:
        said += f"; one device needs {_ms(plan.alone.step_s)} in all"
    assert plan.chosen is not None
    stay = "Stay on one device" if plan.chosen.devices == 1 else f"Use {plan.chosen.devices} devices"
    if plan.chosen.devices > 1:
        stay += f" ({_times(plan.chosen.speedup)})"
    ways = [stay, *_raised(plan, most), *_looser(plan, most)]
    return f"{said}. {', or '.join(ways)}."


def _raised(plan: Plan, most: Row) -> Iterator[str]:
    """The smallest larger batch with which as many devices are worth it, else the best of those tried."""
    tried = []
    for factor in BATCHES:
        batch = plan.subject.global_batch * factor
        larger = replace(plan.subject, global_batch=batch)
        together = _at_batch(larger, most.price, batch)
        alone = _at_batch(larger, plan.alone, batch)
        if not together.fits or not alone.fits:
            break
        tried.append((alone.step_s / together.step_s, batch))
    good = [(speedup, batch) for speedup, batch in tried if speedup >= 0.5 * most.devices]
    best = good[0] if good else max(tried, default=None)
    if best is not None and best[0] > max(PAYS, 1.2 * most.speedup):
        yield f"raise the batch to {best[1]:,} ({_times(best[0])})"


def _at_batch(subject: Subject, of: Price, batch: int) -> Price:
    """The same kind of layout with another batch, in as many passes as fit."""
    layout: Layout = replace(of.layout, global_batch=batch, micro_batch=-(-batch // of.layout.data))
    found = price(subject, layout, of.where)
    while not found.fits and layout.micro_batch > 1:
        layout = replace(layout, micro_batch=-(-layout.micro_batch // 2))
        found = price(subject, layout, of.where)
    return found


def _looser(plan: Plan, most: Row) -> Iterator[str]:
    """Ways to send less, where ranks hold the whole model; they change the answer, and say so."""
    whole = [p for p in most.found.prices if p.layout.plain]
    if not whole:
        return
    layout, where = whole[0].layout, most.price.where
    for ways, words in (
        (Ways("local_sgd", LOCAL_STEPS), f"use local SGD every {LOCAL_STEPS} steps"),
        (Ways("bf16"), "send gradients in bf16"),
    ):
        speedup = plan.alone.step_s / price(plan.subject, layout, where, ways).step_s
        if speedup > max(PAYS, 1.15 * most.speedup):
            yield f"{words} ({_times(speedup)})"


def _too_large(plan: Plan) -> str:
    numbers = plan.subject.numbers
    states = plan.subject.params * (numbers.weight_bytes + numbers.gradient_bytes + numbers.state_bytes)
    device = plan.site.whole.device
    capacity = plan.site.at(1).cluster.device.memory_bytes
    least = min((r.devices for r in plan.rows), default=0)
    return (
        f"It does not fit on one {device.name}: weights, gradients and optimiser states take {size(states)} of "
        f"{size(capacity)}. {family_name(plan.rows[0].price.layout)} on {least} device{'s' * (least > 1)} needs "
        f"{size(plan.rows[0].price.memory.total_bytes)}"
        + (
            f" and {size(plan.rows[0].price.memory.host_bytes)} of host memory"
            if plan.rows[0].price.layout.offload
            else ""
        )
        + " per device."
    )


def _nothing_fits(plan: Plan) -> Iterator[str]:
    last = plan.out[-1] if plan.out else None
    device = plan.site.whole.device
    if last is None or not last.refused:
        yield "No layout is possible on these devices."
        return
    near = min((r for r in last.refused if r.over_bytes), key=lambda r: r.over_bytes, default=last.refused[0])
    yield f"Nothing fits on {last.devices} × {device.name}. Nearest is {near.family}: {near.reason}."
    if plan.subject.counts is not None:
        yield "Take more devices or larger ones, or a smaller model.k: L and F must fit, counts need not."
        return
    yield "Take more devices or larger ones, a smaller train.global_batch, or leave more of `parallel` to the search."


def _types(plan: Plan, chosen: Row) -> Iterator[str]:
    """Another type of the products, where the device is much faster in it or lacks the one asked for."""
    device, precision = chosen.price.where.cluster.device, plan.spec.train.precision
    if device.synchronous:
        return
    if precision == "bf16" and "bf16" not in device.flops_s and "fp16" in device.flops_s:
        yield f"{device.name} has no bf16 units: the plan is for fp16, so use train.precision=fp16."
        return
    if precision not in ("fp32", "fp64"):
        return
    half = "bf16" if "bf16" in device.flops_s else "fp16"
    if half not in device.flops_s:
        return
    kind = NUMBERS[TYPES[half]]
    numbers = replace(kind, state_bytes=plan.subject.numbers.state_bytes, gathered_bytes=kind.weight_bytes)
    faster = price(replace(plan.subject, numbers=numbers), chosen.price.layout, chosen.price.where)
    gain = chosen.price.step_s / faster.step_s
    if gain > 1.15:
        yield f"train.precision={half} would make a step {_times(gain)} as fast."


def _ms(seconds: float) -> str:
    return duration(seconds)


def _times(ratio: float) -> str:
    return f"{ratio:.2g}×" if ratio < 9.95 else f"{ratio:.0f}×"
