"""The rows of a plan beside each other: sums and sentences that hold for every run, cluster and wish."""

import re

import pytest

from paceline.config import build_spec
from paceline.planner.plan import plan
from paceline.planner.rows import Requirements
from paceline.planner.show import render_plan
from results import render_text

CLUSTERS = ("4xV100@pcie", "8xA100", "4x4090", "2x8xH100", "4x1xV100+1Gb", "3xL40S", "8xA100@0.5GB/s", "2x4xT4+10Gb")
MODELS = (
    {"workload": "classifier", "model": {"width": 128, "heads": 4, "layers": 2, "ffn": 512}},
    {"workload": "classifier", "model": {"width": 768, "heads": 12, "layers": 12, "ffn": 3072}},
    {"workload": "lm", "model": {"preset": "gpt2"}, "data": {"sequence": 512, "vocab": 50257}},
    {"workload": "lm", "model": {"preset": "7b"}, "data": {"sequence": 2048, "vocab": 32000}},
)
REQUIREMENTS = (
    Requirements(),
    Requirements(min_efficiency=0.5),
    Requirements(deadline_h=0.2),
    Requirements(deadline_h=2000),
    Requirements(budget_usd=30),
    Requirements(deadline_h=300, budget_usd=5000, min_efficiency=0.3),
)


def planned(place):
    """Some run, somewhere, with some wish: all combinations in turn."""
    values = {"name": "some", "train": {"steps": 500, "global_batch": 16 << place % 5}, **MODELS[place % 4]}
    values["train"]["precision"] = ("bf16", "fp32")[place // 4 % 2]
    cluster = CLUSTERS[place % len(CLUSTERS)]
    return plan(
        build_spec(values), cluster, price=1.5, samples=5000, requirements=REQUIREMENTS[place // 2 % len(REQUIREMENTS)]
    )


@pytest.fixture(scope="module")
def plans():
    return [found for found in map(planned, range(12)) if found.fits]


def test_no_sentence_contradicts_the_table(plans):
    for found in plans:
        said = re.sub(r"\s+", " ", render_text(*render_plan(found, verbose=True)))
        for row in found.rows:
            assert ("gathered layers" in said) == (found.chosen.price.layout.strategy in ("fsdp", "hsdp"))
            if row.devices == 1:
                assert found.rows[0].price.layout.offload or "too small" not in said
        longer = found.rows[-1].price.time.compute_s > found.base.time.compute_s
        assert longer == ("mostly launches" in said)
        assert said.count("✓ is the") <= 1


def test_a_machine_is_paid_for_once():
    """However many ranks share it: the faster row costs less, and none is cheap and called slower."""
    small = {"name": "some", "train": {"steps": 500, "global_batch": 256}, **MODELS[0]}
    found = plan(build_spec(small), "local", [1, 2], 2.0, samples=5000)
    for row in found.rows:
        assert row.cost_usd == pytest.approx(2.0 * row.hours)
    assert {found.ranking.verdict(row) for row in found.rows} == {"fastest", "slower"}
    assert found.ranking.fastest is found.ranking.cheapest
    assert "Amdahl" not in render_text(*render_plan(found, verbose=True))


def test_more_devices_that_compute_for_longer_are_explained():
    """Four V100s: 12 ms of kernels launched one by one, against 3 ms of a graph on one."""
    found = planned(0)
    assert found.rows[-1].price.time.compute_s > found.base.time.compute_s
    assert any("CUDA graph" in line for line in found.advice)


def test_a_run_file_that_fixes_two_devices_is_not_called_too_large():
    values = {"name": "small", **MODELS[2], "train": {"steps": 500, "global_batch": 64, "precision": "bf16"}}
    found = plan(build_spec({**values, "parallel": {"tensor": 2, "ranks": 2}}), "4xA100")
    assert found.base.devices == 2
    assert not any("too small" in line for line in found.advice)
