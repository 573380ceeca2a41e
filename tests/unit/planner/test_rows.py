"""The rows of a plan beside each other; what holds for every run, cluster and wish is in `plan_consistency`."""

import pytest

from paceline.config import build_spec
from paceline.planner.plan import plan
from paceline.planner.show import render_plan
from plan_specs import lm
from results import render_text


def test_a_machine_is_paid_for_once():
    """However many ranks share it: the faster row costs less, and none is cheap and called slower."""
    found = plan(build_spec({"train": {"steps": 500, "global_batch": 256}}), "local", [1, 2], 2.0, samples=5000)
    for row in found.rows:
        assert row.cost_usd == pytest.approx(2.0 * row.hours)
    assert {found.ranking.verdict(row) for row in found.rows} == {"fastest", "slower"}
    assert found.ranking.fastest is found.ranking.cheapest
    assert "Amdahl" not in render_text(*render_plan(found, verbose=True))


def test_more_devices_that_compute_for_longer_are_explained():
    """Four V100s: 12 ms of kernels launched one by one, against 3 ms of a graph on one."""
    found = plan(
        build_spec({"train": {"steps": 500, "global_batch": 16, "precision": "bf16"}}), "4xV100@pcie", samples=5000
    )
    assert found.rows[-1].price.time.compute_s > found.base.time.compute_s
    assert any("CUDA graph" in line for line in found.advice)


def test_a_run_file_that_fixes_two_devices_is_not_called_too_large():
    found = plan(lm("gpt2", 64, 512, 50257, parallel={"tensor": 2, "ranks": 2}), "4xA100")
    assert found.base.devices == 2
    assert not any("too small" in line for line in found.advice)
