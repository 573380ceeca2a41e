"""A step played event by event: as long as the formulas say where they apply, and in the order of its schedule."""

import functools
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.layout import Layout
from paceline.planner.cost_model import build_cost_model
from paceline.planner.formulas.placement import Placement
from paceline.planner.formulas.simulation import order_passes, simulate_step
from paceline.planner.plan import plan
from paceline.planner.target import resolve_target
from plan_specs import lm


@functools.cache
def build_lm(preset):
    return build_cost_model(lm(preset, 1, 1024))


def draw_step(rng):
    """Draw a model, a cluster and any layout of it, whether it fits or not."""
    preset, ranks = rng.choice(["gpt2", "1b", "3b", "7b"]), 1 << rng.randrange(6)
    cost_model = replace(build_lm(preset), global_batch=ranks * rng.choice([1, 2, 4, 8, 16, 32]))
    device = rng.choice(["H100", "A100", "V100-SXM2-32GB"])
    where = resolve_target(f"{max(1, ranks // 8)}x{min(ranks, 8)}x{device}").at(ranks)
    families = [f for f in cost_model.families(ranks, where.cluster) if isinstance(f, Layout) and not f.offload]
    layouts = [one for members in cost_model.members(rng.choice(families), False) for one in members]
    layout = rng.choice(list(cost_model.schedules(rng.choice(layouts))))
    if layout.pipeline > 1 and rng.random() < 0.3:
        layout = replace(layout, schedule="gpipe")
    return cost_model._step_pricer(layout, where)


def both_apply(pricer):
    """The formulas spread communication over longer computation, and take stages to be equal and to have much to do."""
    placement, time = pricer.placement, pricer.price()
    if placement.pipeline > 1:
        equal = pricer.blocks[1].repeat % (placement.pipeline * placement.chunks) == 0
        if not equal or placement.accumulate < 4 * placement.pipeline:
            return False
        if placement.zero < 3 and pricer.price_reduction()[0] > time.compute_s / placement.accumulate / 2:
            return False
    return time.comm_s <= time.compute_s / 3


def test_200_random_layouts_take_as_long_as_the_formulas_say():
    rng, errors = random.Random(29), []
    while len(errors) < 200:
        pricer = draw_step(rng)
        if both_apply(pricer):
            errors.append(simulate_step(pricer).step_s / pricer.price().step_s - 1)
    assert max(map(abs, errors)) < 0.03
    assert sum(map(abs, errors)) / len(errors) < 0.005


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_each_stage_makes_every_pass_once(schedule):
    chunks = 2 if schedule in ("interleaved", "zero_bubble") else 1
    placement = Placement(pipeline=4, accumulate=12, schedule=schedule, chunks=chunks)
    for stage in range(4):
        order = order_passes(placement, stage, 12)
        kinds = 3 if schedule == "zero_bubble" else 2
        assert set(Counter(order).values()) == {1}
        assert len(order) == kinds * 12 * chunks
        began = {one: k for k, one in enumerate(order)}
        assert all(k > began[replace(one, kind="forward")] for one, k in began.items() if one.kind == "backward")


def test_the_trace_of_a_plan():
    found = plan(lm("1b", 64, parallel={"pipeline": 4}), "8xA100", [8])
    trace = found.as_trace()
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"ranks 0 to 1", "ranks 6 to 7", "compute", "sends"} <= names
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    for lane in {(event["pid"], event["tid"]) for event in spans}:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == lane)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(times))
    assert trace["otherData"]["step_s"] == found.timeline.step_s == found.as_json()["simulated_step_s"]
