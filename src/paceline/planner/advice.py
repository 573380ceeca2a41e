"""Advise what to change, for plans and for runs that ran out of memory; every number is priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.config import RunSpec
from paceline.config.registry import find_entry
from paceline.errors import PacelineError
from paceline.io.format import duration, number, percent, size
from paceline.layout import ZERO_STAGES, Layout, layout_of
from paceline.planner.candidates import LayoutConstraints, PricedLayout
from paceline.planner.cost_model import CostModel, build_cost_model
from paceline.planner.formulas.placement import Reduction
from paceline.planner.rows import EQUALLY_FAST
from paceline.planner.search import search_layouts
from paceline.planner.target import resolve_target

if TYPE_CHECKING:
    from paceline.planner.plan import Plan
    from paceline.planner.rows import PlanRow
    from paceline.planner.training_cost import TrainingCostModel

WORTHWHILE_SPEEDUP = 1.1  # speed-up from which more devices pay
BATCH_FACTORS = (2, 4, 8, 16, 32)
LOCAL_STEPS = 8
MIN_IDLE = 0.01  # share of the ranks' time from which an uneven batch is mentioned
MAX_SUGGESTIONS = 4


def explain_misfit(plan: Plan) -> Iterator[str]:
    """Yield by how much the nearest layout misses the memory, if nothing fits."""
    last = plan.misfits[-1] if plan.misfits else None
    if last is None or not last.rejected:
        yield "No layout is possible on these devices."
        return
    near = min((r for r in last.rejected if r.over_bytes), key=lambda r: r.over_bytes, default=last.rejected[0])
    where = f"{last.devices} × {plan.target.whole.device.name}"
    if not near.over_bytes:
        yield f"Not possible on {where}: {near.family}: {near.reason}."
        return
    yield f"Nothing fits on {where}. Nearest is {near.family}: {near.reason}."
    nearest = near.nearest
    divides = nearest is None or nearest.memory.shrinks_with_devices(ZERO_STAGES[nearest.layout.strategy])
    devices = "more devices or larger ones" if divides else "larger devices"
    search = ", or leave more of `parallel` to the search" if plan.cost_model.constraints.describe() else ""
    yield plan.cost_model.wording.to_fit.format(devices=devices, search=search)


def advise_training(cost_model: TrainingCostModel, plan: Plan) -> Iterator[str]:
    """Yield whether more devices pay, and what would be faster or need less memory."""
    assert plan.chosen is not None
    assert plan.base is not None
    base, price, most = plan.base, plan.chosen.price, plan.rows[-1]
    if _exceeds_one_device(cost_model, plan):
        yield _explain_too_small(plan)
    if most.devices == base.devices or (plan.chosen.devices == 1 and most.efficiency >= 0.5):
        step = f"a step of {cost_model.global_batch:,} samples takes {duration(price.step_s)}"
        yield f"{price.layout.family} on {_count_devices(price.devices)}: {step}."
    elif most.efficiency < 0.5:
        yield _describe_loss(cost_model, plan, most)
    else:
        yield f"{_describe_speed(cost_model, plan.chosen, base)}."
    yield from _explain_longer_compute(cost_model, base, most.price, plan.target.shared)
    if price.tight:
        need = f"May need up to {size(price.memory_band_bytes[1])}; the device has {size(price.capacity_bytes)}"
        yield f"{need}: parallel.micro_batch or parallel.activation_checkpointing give room."
    if price.waits_for_data:
        yield f"Input holds a step up for {duration(price.time.data_s)}: store samples smaller, or keep them in memory."
    yield from _suggest_even_batch(price.layout)
    yield from _suggest_precision(cost_model, price)


def advise_few_devices(plan: Plan, device: str, step: str, lost: str) -> Iterator[str]:
    """Yield how long a pass takes on one device, and what it would gain and lose on the most, if one is chosen."""
    assert plan.chosen is not None
    chosen, most = plan.chosen, plan.rows[-1]
    takes = f"{step} takes {duration(chosen.price.step_s)}"
    if most.devices == 1:
        yield f"One {device}: {takes}."
    elif chosen.devices == 1:
        as_long = most.speedup > 1 and most.run_s * EQUALLY_FAST >= chosen.run_s
        sooner = ", and the whole fit would end less than 5 % sooner" if as_long else ""
        would = f"{most.devices} would run at {format_times(most.speedup)}{sooner}"
        work = duration(most.price.time.compute_s)
        yield f"Stay on one {device}, where {takes}: {would}. Each would work {work} and {lost}."


def _suggest_even_batch(layout: Layout) -> Iterator[str]:
    """Name the nearest batches that divide among the ranks, if this one leaves some of them idle."""
    batch, ranks = layout.global_batch, layout.data
    idle = 1 - batch / ranks / -(-batch // ranks)
    if idle > MIN_IDLE:
        below = batch - batch % ranks
        near = " or ".join(f"train.global_batch={size}" for size in (below, below + ranks) if size)
        yield f"Batch {batch:,} does not divide among {ranks} ranks, {percent(idle)} of which idle: use {near}."


def describe_base(cost_model: CostModel, base: PricedLayout) -> str:
    layout = cost_model.layout_name(base).replace(" *", ", states in host memory")
    return "one device" if layout == "single" else f"{_count_devices(base.devices)} ({layout})"


def _count_devices(devices: int) -> str:
    return "one device" if devices == 1 else f"{devices:,} devices"


def _exceeds_one_device(cost_model: TrainingCostModel, plan: Plan) -> bool:
    """Return whether one device is too small, whatever the run file fixes."""
    assert plan.base is not None
    if plan.base.devices == 1 and not plan.base.layout.offload:
        return False
    free = replace(cost_model, constraints=LayoutConstraints())
    alone = search_layouts(free, 1, plan.target.at(1)).chosen
    return alone is None or alone.layout.offload


def _explain_too_small(plan: Plan) -> str:
    """Return why one device is too small: training states exceed its memory, or leave no room for activations."""
    numbers, cost_model = plan.cost_model.numbers, plan.cost_model
    states = cost_model.stored_params * numbers.weight_bytes
    states += cost_model.trained_params * (numbers.gradient_bytes + numbers.state_bytes)
    device = plan.target.at(1).cluster.device
    room = f"the device has {size(device.memory_bytes)}"
    if states <= device.memory_bytes:
        room = "activations do not fit beside them"
    need = f"weights, gradients and optimiser states need {size(states)}; {room}"
    return f"One {device.name} is too small: {need}."


def _describe_speed(cost_model: TrainingCostModel, row: PlanRow, base: PricedLayout) -> str:
    """Compare a row with the base, and name the largest parts of its step."""
    time, name = row.price.time, f"{row.price.layout.family} on {_count_devices(row.devices)}"
    hidden, fixed = time.comm_s - time.exposed_s, time.update_s + time.overhead_s
    parts = [f"compute {duration(time.compute_s)}", f"communication {duration(time.comm_s)}"]
    if hidden > 0.1 * time.comm_s:
        parts[1] += f" ({percent(hidden / time.comm_s)} hidden)"
    if fixed > time.exposed_s:
        parts.append(f"launches and update {duration(fixed)}")
    speed = f"{format_times(row.speedup)} the speed of {describe_base(cost_model, base)}"
    return f"{name} will run at {speed}; each step: {', '.join(parts)}"


def _describe_loss(cost_model: TrainingCostModel, plan: Plan, most: PlanRow) -> str:
    """Return how fast devices that do not pay would run, why, and what would help instead."""
    base, chosen, knee = plan.base, plan.chosen, plan.ranking.knee
    assert base is not None
    assert chosen is not None
    text, ways = _describe_speed(cost_model, most, base), list[str]()
    if chosen.devices < most.devices:
        ways = [f"take {_count_devices(chosen.devices)} ({format_times(chosen.speedup)})"]
    elif knee is not None and knee.devices < most.devices:
        text += f"; {_count_devices(knee.devices)} ({format_times(knee.speedup)}) cost the least time × money"
    ways += [*_suggest_larger_batch(cost_model, most, base), *_suggest_less_communication(cost_model, base, most)]
    do = ", or ".join(ways)
    return f"{text}. {do[0].upper()}{do[1:]}." if do else f"{text}."


def _explain_longer_compute(
    cost_model: TrainingCostModel, base: PricedLayout, most: PricedLayout, shared: bool
) -> Iterator[str]:
    """Yield why more devices compute for longer, if they do."""
    if most.devices == base.devices or most.time.compute_s <= base.time.compute_s:
        return
    alone, together = (cost_model.placement(p.layout, p.where.cluster.device).runtime for p in (base, most))
    reason = "so small a part of the batch is mostly launches, which do not shrink with it"
    if shared:
        reason = "ranks share the cores of one machine"
    elif alone.one_graph and not together.one_graph:
        reason = "one device replays a CUDA graph; with several, so small a step is mostly launches by the host"
    longer = f"{_count_devices(most.devices)} compute {duration(most.time.compute_s)} in a step"
    yield f"{longer}, {describe_base(cost_model, base)} {duration(base.time.compute_s)}: {reason}."


def _suggest_larger_batch(cost_model: TrainingCostModel, most: PlanRow, base: PricedLayout) -> Iterator[str]:
    """Suggest the smallest larger batch with which as many devices pay, else the best of those tried."""
    tried = []
    for factor in BATCH_FACTORS:
        batch = cost_model.global_batch * factor
        larger = replace(cost_model, global_batch=batch, reduction=Reduction())
        together, alone = (_price_at_batch(larger, price, batch) for price in (most.price, base))
        if not together.fits or not alone.fits:
            break
        tried.append((alone.step_s / together.step_s, batch))
    good = [(speedup, batch) for speedup, batch in tried if speedup * base.devices >= 0.5 * most.devices]
    best = good[0] if good else max(tried, default=None)
    if best is not None and best[0] > max(WORTHWHILE_SPEEDUP, 1.2 * most.speedup):
        yield f"raise the batch to {best[1]:,} ({format_times(best[0])})"


def _price_at_batch(cost_model: TrainingCostModel, price: PricedLayout, batch: int) -> PricedLayout:
    """Price the same kind of layout with another batch, in the largest micro-batches that fit."""
    layout = replace(price.layout, global_batch=batch, micro_batch=-(-batch // price.layout.data))
    found = cost_model.price(layout, price.where)
    while not found.fits and layout.micro_batch > 1:
        layout = replace(layout, micro_batch=-(-layout.micro_batch // 2))
        found = cost_model.price(layout, price.where)
    return found


def _suggest_less_communication(cost_model: TrainingCostModel, base: PricedLayout, most: PlanRow) -> Iterator[str]:
    """Suggest ways to send less, if ranks hold the whole model."""
    whole = [p for p in most.found.prices if p.layout.plain]
    if not whole:
        return
    for reduction, words in (
        (Reduction("local_sgd", LOCAL_STEPS), f"use local SGD every {LOCAL_STEPS} steps"),
        (Reduction("bf16"), "send gradients in bf16"),
    ):
        price = replace(cost_model, reduction=reduction).price(whole[0].layout, most.price.where)
        speedup = base.step_s / price.step_s
        if speedup > max(WORTHWHILE_SPEEDUP, 1.15 * most.speedup):
            yield f"{words} ({format_times(speedup)})"


def _suggest_precision(cost_model: TrainingCostModel, chosen: PricedLayout) -> Iterator[str]:
    """Suggest another precision if the device is much faster in it or lacks the one asked for."""
    device, precision = chosen.where.cluster.device, cost_model.train.precision
    if device.synchronous:
        return
    if precision == "bf16" and "bf16" not in device.flops_s and "fp16" in device.flops_s:
        yield f"{device.name} has no bf16 units: the plan is for fp16, so use train.precision=fp16."
        return
    half = "bf16" if "bf16" in device.flops_s else "fp16"
    if precision not in ("fp32", "fp64") or half not in device.flops_s:
        return
    other = replace(cost_model.with_precision(half), reduction=Reduction())
    gain = chosen.step_s / other.price(chosen.layout, chosen.where).step_s
    if gain > 1.15:
        yield f"train.precision={half} would make a step {format_times(gain)} as fast."


def format_times(ratio: float) -> str:
    return f"{ratio:.2g}×" if ratio < 9.95 else f"{ratio:.0f}×"


def suggest_memory_savings(spec: RunSpec) -> str:
    """Return what would need less memory, after an error for lack of it; "" if it cannot be priced."""
    if not find_entry(spec.workload).batched:
        return ""
    try:
        cost_model = build_cost_model(spec)
        now = _price_spec(cost_model, spec)
    except Exception:  # tracing the user's model may run out of memory again: the first error counts
        return ""
    less = []
    for changes in _list_memory_changes(spec):
        try:
            price = _price_spec(cost_model, spec.replace(changes))
        except PacelineError:  # not for this model, or more devices than there are
            continue
        saves = price.memory.total_bytes < now.memory.total_bytes
        if saves and size(price.memory.total_bytes) != size(now.memory.total_bytes):
            less.append((price, "  ".join(f"{key}={value}" for key, value in changes.items())))
    memory = now.memory
    lines = [
        f"the plan counts {size(memory.total_bytes)} per rank, most of it {memory.largest_term()}; the device has "
        f"{size(now.capacity_bytes)}" + ("; what needs less:" if less else "")
    ]
    width = max((len(words) for _, words in less), default=0)
    for price, words in sorted(less, key=lambda way: way[0].step_s)[:MAX_SUGGESTIONS]:
        slower = price.step_s / now.step_s
        lines.append(f"  {words:<{width}}  {size(price.memory.total_bytes)}, {number(slower, 3)} × the time of a step")
    return "\n".join(f"  {line}" for line in lines)


def _price_spec(cost_model: CostModel, spec: RunSpec) -> PricedLayout:
    layout = layout_of(spec)
    return cost_model.price(layout, resolve_target(spec.cluster).at(layout.ranks))


def _list_memory_changes(spec: RunSpec) -> Iterator[dict[str, Any]]:
    layout, parallel = layout_of(spec), spec.parallel
    if layout.micro_batch > 1:
        yield {"parallel.micro_batch": layout.micro_batch // 2}
    if parallel.activation_checkpointing != "full":
        yield {"parallel.activation_checkpointing": "full"}
    if layout.plain:
        yield {"parallel.strategy": "fsdp", "parallel.ranks": max(2, layout.ranks)}
    if not parallel.offload:
        yield {"parallel.strategy": "fsdp", "parallel.offload": "true"}
    if spec.train.precision == "fp32":
        yield {"train.precision": "bf16"}
