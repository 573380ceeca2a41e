"""Often-quoted results from first principles: where they agree, and which assumption explains the rest."""

import pytest
from unknown_shapes import typical

from paceline.config import build_spec
from paceline.hardware.catalogue import parse_cluster
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS, Placement, Runtime
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION, BlockShape, Matmul, ModelShape
from paceline.planner.formulas.step_time import StepPricer
from paceline.planner.plan import plan


def step_s(model, placement, where, kind):
    return StepPricer(model.blocks, placement, where, DTYPE_SIZES[kind], GPU_PHYSICS).price().step_s


def weak_speedup(model, ranks, where, micro, kind="amp_bf16"):
    alone = step_s(model, Placement(micro_batch=micro), where.resized(1), kind)
    return ranks * alone / step_s(model, Placement(replicate=ranks, micro_batch=micro), where, kind)


@pytest.mark.parametrize(("ranks", "published"), [(2, 1.95), (4, 3.8), (8, 7.5), (16, 14.5), (32, 28)])
def test_a_billion_parameters_under_ddp_scale_as_quoted(ranks, published):
    where = parse_cluster("8xA100").resized(ranks)
    assert weak_speedup(typical(1e9, 1024), ranks, where, micro=8) == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "where", "published"), [(2, "2xA100", 1.85), (4, "2x2xA100+200Gb", 3.43), (8, "4x2xA100+200Gb", 6.0)]
)
def test_two_devices_per_node_and_200_gigabit_scale_as_quoted(ranks, where, published):
    speedup = weak_speedup(typical(3e8, 512), ranks, parse_cluster(where), micro=32)
    assert speedup == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(
    ("sizes", "epoch_s"), [((2, 128, 4, 128, 10_000, 512), 19.53), ((4, 256, 8, 256, 30_000, 1024), 99.94)]
)
def test_small_classifiers_take_an_epoch_as_published_on_one_device(sizes, epoch_s):
    model = ModelShape(*sizes, causal=False, classes=4)
    each_s = step_s(model, Placement(micro_batch=128), parse_cluster("1xV100"), "fp32")
    assert 120_000 / 128 * each_s == pytest.approx(epoch_s, rel=0.25)


# ── a topic model of 100k documents × 100k terms, 20 topics, 16 documents per step and device, 200 epochs

DOCUMENTS, TERMS, TOPICS, BATCH, EPOCHS = 100_000, 100_000, 20, 16, 200


def topic_step_s(devices, where):
    """A step as its authors ran it: rows of fp32 counts from a memory map, read before each step and not ahead."""
    operations = 8  # of a forward pass: two softmaxes, a product, a logarithm, products and sums of the loss
    model = BlockShape(
        "topics",
        1,
        params=(DOCUMENTS + TERMS) * TOPICS,
        matmuls=(Matmul(1, TOPICS, TERMS),),
        attention=None,
        moved_elements=6.0 * TERMS,
        saved_split_elements=0,
        saved_whole_elements=3.0 * TERMS,
        edge_elements=0,
        kernels=operations * LAUNCHES_PER_OPERATION,
    )
    placement = Placement(replicate=devices, micro_batch=BATCH, runtime=Runtime(fused_update=True))
    work_s = StepPricer((model,), placement, where, DTYPE_SIZES["fp32"], GPU_PHYSICS).price().step_s
    return work_s + BATCH * TERMS * 4 / GPU_PHYSICS.input_bytes_s


@pytest.mark.parametrize(
    ("where", "usd_per_hour", "epoch_s", "minutes", "usd"),
    [("1xH100", 3.29, 24, 80, 4.38), ("4xH100", 12.36, 6, 20, 4.12)],
)
def test_a_topic_model_takes_the_time_and_the_money_that_were_published(where, usd_per_hour, epoch_s, minutes, usd):
    place = parse_cluster(where)
    epoch = DOCUMENTS / (BATCH * place.devices) * topic_step_s(place.devices, place)
    assert epoch == pytest.approx(epoch_s, rel=0.25)
    assert EPOCHS * epoch / 60 == pytest.approx(minutes, rel=0.25)
    assert EPOCHS * epoch / 3600 * usd_per_hour == pytest.approx(usd, rel=0.25)


@pytest.mark.parametrize(
    ("where", "seconds", "usd_per_hour", "usd"), [("1xH100", 5.5, 3.29, 4.38), ("4xH100", 2.6, 3.09, 4.12)]
)
def test_a_fit_of_the_same_counts_takes_seconds_and_half_a_cent(where, seconds, usd_per_hour, usd):
    """In 8 bits, on the device; 60 passes are enough for the loss of the true parameters."""
    spec = build_spec({"workload": "topics", "model": {"k": TOPICS}, "train": {"steps": 60}})
    row = plan(spec, where, [parse_cluster(where).devices], usd_per_hour, samples=DOCUMENTS).rows[0]
    assert row.price.memory.tier == "in memory"
    assert row.hours * 3600 == pytest.approx(seconds, rel=0.05)
    assert row.cost_usd < usd / 400
