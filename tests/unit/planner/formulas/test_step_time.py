"""Times against formulas worked by hand, and the ways they must move."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import split_by_cost
from paceline.hardware.catalogue import parse_cluster
from paceline.hardware.failures import find_slowest
from paceline.planner.formulas.compute import Roofline, count_fused_scores
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS, PHYSICS_TABLE, Placement, Runtime
from paceline.planner.formulas.shape import ModelShape
from paceline.planner.formulas.step_time import StepPricer, all_gather_s, all_reduce_s, build_group
from paceline.planner.training_cost import LengthStats

IDEAL = replace(
    GPU_PHYSICS,
    matmul_efficiency=1,
    half_tiles=0,
    ragged_efficiency=1,
    bandwidth_efficiency=1,
    fusion=0,
    launch_s=0,
    link_efficiency=1,
    node_efficiency=1,
    link_latency_s=0,
    node_latency_s=0,
    call_s=0,
    overlap=1,
    spread=0,
)
A100 = parse_cluster("8xA100")
BF16 = DTYPE_SIZES["bf16"]
SMALL = ModelShape(12, 1024, 16, 1024, 50_304)


def price(model, placement, physics=IDEAL, kind=BF16, where=A100):
    return StepPricer(model.blocks, placement, where, kind, physics).price()


def step_s(model, placement, where, kind=BF16):
    return price(model, placement, GPU_PHYSICS, kind, where).step_s


def test_few_numbers_each_with_a_unit_and_a_meaning():
    assert len(PHYSICS_TABLE) < 25
    for name, row in PHYSICS_TABLE.items():
        assert row["unit"], name
        assert len(row["meaning"]) > 10, name


def test_a_large_product_runs_at_the_best_measured_rate_and_a_thin_one_at_that_of_the_memory():
    n, matmul_s = 8192, Roofline(A100.device, BF16, IDEAL).matmul_s
    assert matmul_s(n, n, n) == pytest.approx(2 * n**3 / (312e12 * 0.869), rel=1e-6)
    assert matmul_s(1, n, n) == pytest.approx((n + n**2 + n) * 2 / 2039e9, rel=1e-6)
    half = replace(IDEAL, ragged_efficiency=0.5)
    even, ragged = (Roofline(A100.device, BF16, half).matmul_s(n, n, side) for side in (n, n - 8))
    assert ragged / even == pytest.approx(2, rel=0.01)


def test_all_reduce_is_the_well_known_limit_and_its_latency_grows_until_a_tree_is_shorter():
    ring = build_group(4, 1, parse_cluster("4xA100@pcie"), IDEAL)
    assert all_reduce_s(1e9, ring, IDEAL) == pytest.approx(2 * 3 / 4 * 1e9 / 31e9)
    assert all_gather_s(1e9, ring, IDEAL) == pytest.approx(3 / 4 * 1e9 / 31e9)
    assert all_reduce_s(1e9, build_group(1, 1, A100, IDEAL), IDEAL) == 0
    physics = replace(IDEAL, node_latency_s=1e-5)
    few, many = (build_group(n, 1, parse_cluster(f"{n}x1xA100"), physics) for n in (2, 1024))
    assert all_reduce_s(0, few, physics) == pytest.approx(2e-5)
    assert all_reduce_s(0, many, physics) == pytest.approx(2 * 10 * 1e-5)
    assert all_gather_s(0, many, physics) == pytest.approx(1023e-5)


def test_groups_that_cross_nodes_share_the_network():
    two = parse_cluster("2x8xA100")
    everyone = build_group(16, 1, two, IDEAL)
    assert (everyone.in_node, everyone.nodes) == (8, 2)
    assert everyone.bytes_s == pytest.approx(1600e9 / 8)
    pairs = build_group(2, 8, two, IDEAL)  # eight such groups at once
    assert (pairs.in_node, pairs.nodes) == (1, 2)
    assert pairs.bytes_s == pytest.approx(1600e9 / 8 / 8)
    assert build_group(8, 1, two, IDEAL).nodes == 1


def test_the_bubble_is_stages_minus_one_over_passes():
    model = ModelShape(16, 1024, 16, 1024, 64)  # a head and an embedding of next to nothing
    t = price(model, Placement(pipeline=4, accumulate=8))
    assert t.bubble_s / t.compute_s == pytest.approx(3 / 8, rel=0.02)
    interleaved = price(model, Placement(pipeline=4, accumulate=8, chunks=4))
    assert interleaved.bubble_s == pytest.approx(t.bubble_s / 4, rel=0.02)


def test_full_recomputation_costs_a_third_more():
    model = ModelShape(24, 4096, 32, 512, 64, fused_attention=False)
    none, full = (price(model, Placement(micro_batch=8, recompute=r)) for r in ("none", "full"))
    assert full.compute_s / none.compute_s == pytest.approx(4 / 3, rel=0.01)


def test_ranks_wait_for_the_slowest_device_and_the_longest_samples():
    placement, shared = Placement(replicate=8, micro_batch=4), ModelShape(2, 64, 4, 128, 1000).blocks
    physics = replace(IDEAL, spread=0.02)
    steady, uneven = (StepPricer(shared, placement, A100, BF16, physics, by).price() for by in (0.0, 0.03))
    busy_s = steady.step_s - steady.update_s - steady.overhead_s - steady.waiting_s
    assert steady.waiting_s == pytest.approx(0.02 * find_slowest(8) * busy_s)
    assert uneven.waiting_s == pytest.approx(math.hypot(0.02, 0.03) * find_slowest(8) * busy_s)
    four = StepPricer(shared, replace(placement, accumulate=4), A100, BF16, physics, 0.03).price()
    assert four.waiting_s / four.compute_s < uneven.waiting_s / uneven.compute_s  # passes even out
    assert StepPricer(shared, Placement(), A100, BF16, physics, 0.03).price().waiting_s == 0


@pytest.mark.parametrize(("samples", "ranks"), [(1, 4), (4, 8), (8, 32), (16, 128)])
def test_samples_that_are_dealt_by_cost_differ_between_ranks_as_planned(samples, ranks):
    """Lengths as those of texts, log-normal with a deviation of 0.4: the largest share, drawn and planned."""
    rng, sigma, drawn = np.random.default_rng(0), math.sqrt(math.log(1.16)), []
    for _ in range(50):
        cost = rng.lognormal(-sigma * sigma / 2, sigma, samples * ranks)
        shares = np.array([cost[share].sum() for share in split_by_cost(cost, ranks)])
        drawn.append(shares.max() / shares.mean() - 1)
    planned = LengthStats(4.0, 0.4).dealt_deviation(samples) * find_slowest(ranks)
    assert 0.6 < np.mean(drawn) / planned < 1.4


def test_accumulation_sends_gradients_once_and_sharded_weights_in_every_pass():
    once, four = (price(SMALL, Placement(replicate=8, micro_batch=2, accumulate=a)) for a in (1, 4))
    assert four.comm_s == pytest.approx(once.comm_s)
    assert four.compute_s == pytest.approx(4 * once.compute_s)
    kind = DTYPE_SIZES["pure_bf16"]
    ddp = price(SMALL, Placement(replicate=8, accumulate=2), kind=kind)
    fsdp = price(SMALL, Placement(shard=8, zero=3, accumulate=2), kind=kind)
    assert fsdp.comm_s / ddp.comm_s == pytest.approx(2 * 1.5)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(2, 48),
    width=st.sampled_from([256, 768, 1024, 4096]),
    micro=st.integers(1, 16),
    accumulate=st.integers(1, 8),
    where=st.sampled_from(["1xA100", "8xH100", "4x8xV100", "128x8xH100", "4x1xCPU+1Gb"]),
    zero=st.sampled_from([0, 1, 3]),
    kind=st.sampled_from(sorted(DTYPE_SIZES)),
)
def test_prices_are_finite_and_move_the_right_way(layers, width, micro, accumulate, where, zero, kind):
    model = ModelShape(layers, width, width // 64, 512, 32_000)
    c = parse_cluster(where)
    base = Placement(shard=c.devices, zero=zero, micro_batch=micro, accumulate=accumulate)
    price = step_s(model, base, c, kind=DTYPE_SIZES[kind])
    assert math.isfinite(price)
    assert price > 0
    assert step_s(model, replace(base, micro_batch=micro + 1), c, kind=DTYPE_SIZES[kind]) > price * 0.999
    assert step_s(model, replace(base, accumulate=accumulate + 1), c, kind=DTYPE_SIZES[kind]) > price
    slower = replace(c, node_bytes_s=c.node_bytes_s / 10, link_bytes_s=c.link_bytes_s / 10)
    assert step_s(model, base, slower, kind=DTYPE_SIZES[kind]) >= price


def test_a_fused_attention_computes_whole_tiles():
    tile = 128 * 128
    assert count_fused_scores(48, 48, causal=False) == 2 * tile  # one, and one to begin and end the row
    assert count_fused_scores(1024, 1024, causal=True) == (8 * 9 / 2 + 8) * tile
    assert count_fused_scores(1024, 1024, causal=False) == (8 * 8 + 8) * tile


def test_recomputation_that_stops_early_leaves_out_the_last_product():
    layer = SMALL.blocks[1]
    full, early = (
        Roofline(A100.device, BF16, IDEAL).price_block(
            layer, Placement(recompute="full", runtime=Runtime(stops_early=early))
        )
        for early in (False, True)
    )
    assert full.recompute_s == pytest.approx(full.forward_s), "a third more than forward and backward"
    assert early.forward_s == pytest.approx(full.forward_s)
    assert 0.6 * full.recompute_s < early.recompute_s < 0.9 * full.recompute_s


def test_layers_that_are_compiled_one_by_one_still_wait_for_a_slow_host():
    eager, layers, graph = (
        step_s(
            SMALL,
            Placement(micro_batch=1 / 8, runtime=Runtime(kernels=kernels, recorded=recorded)),
            parse_cluster("1xH100"),
        )
        for kernels, recorded in (("eager", False), ("compiled", False), ("compiled", True))
    )
    assert eager > 2 * layers > 2 * graph


def test_attention_of_the_generation_before_reaches_part_of_the_rate():
    """FlashAttention 2 on an H100 against cuDNN; on an A100 there is no difference."""
    long = ModelShape(1, 2048, 16, 65_536, 50_304).blocks[1]
    free = replace(IDEAL, kernel_s=0, attention_efficiency=1e-3)  # nothing but the products of the scores
    ratios = []
    for where in (A100, parse_cluster("8xH100")):
        newer, older = (
            Roofline(where.device, BF16, free).price_block(long, Placement(runtime=Runtime(older_attention=o))).total_s
            for o in (False, True)
        )
        ratios.append(older / newer)
    assert ratios == pytest.approx([1, 1 / 0.63], rel=0.01)


def test_a_fused_loss_moves_the_logits_three_times():
    """Two reads and a write in all, whatever an eager loss would do."""
    head = ModelShape(1, 64, 1, 1024, 50_304).blocks[-1]
    moved_s = 1024 * 50_304 * 2 / A100.device.bandwidth_bytes_s
    price = Roofline(A100.device, BF16, replace(IDEAL, fusion=2, kernel_s=0)).price_block
    eager, fused = (price(head, Placement(runtime=Runtime(fused_loss=f))).total_s for f in (False, True))
    assert eager - fused == pytest.approx((2 * 4 - 1) * 3 * moved_s, rel=1e-6)
