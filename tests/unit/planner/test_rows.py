"""The rows of a plan beside each other: sums and sentences that hold for every run, cluster and wish."""

import re
from itertools import pairwise

import pytest

from paceline.config import build_spec
from paceline.planner.plan import plan
from paceline.planner.rows import EQUALLY_FAST, Requirements
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


def printed(found):
    return render_text(*render_plan(found, verbose=True))


def test_the_tick_is_what_was_asked_for(plans):
    for found in plans:
        chosen, requirements = found.chosen, found.requirements
        kept = [row for row in found.rows if not requirements.violation_of(row)]
        if requirements.deadline_h is not None and kept:
            assert chosen.cost_usd == min(row.cost_usd for row in kept)
        elif kept:
            assert chosen.run_s <= EQUALLY_FAST * min(row.run_s for row in kept)
            fewer = [row for row in kept if row.devices < chosen.devices]
            assert all(row.run_s > EQUALLY_FAST * min(r.run_s for r in kept) for row in fewer)
        else:
            assert not found.ranking.accepted
            assert "comes nearest" in printed(found)


def test_the_best_rows_are_the_best(plans):
    for found in plans:
        rows, choice = found.rows, found.ranking
        assert choice.cheapest.cost_usd == min(row.cost_usd for row in rows)
        assert choice.fastest.hours == min(row.hours for row in rows)
        assert choice.most_efficient.efficiency == max(row.efficiency for row in rows)
        assert choice.knee.hours * choice.knee.cost_usd == min(row.hours * row.cost_usd for row in rows)
        assert choice.relative_cost(choice.cheapest) == 1
        assert not choice.is_dominated(choice.fastest)
        assert not choice.is_dominated(choice.cheapest)
        front = [row for row in rows if not choice.is_dominated(row)]
        assert all(a.hours > b.hours and a.cost_usd < b.cost_usd for a, b in pairwise(front))


def test_speedups_are_over_one_named_thing_that_there_is(plans):
    for found in plans:
        base = found.base
        assert base.fits
        for row in found.rows:
            assert row.speedup == pytest.approx(base.step_s / row.price.step_s)
            assert row.efficiency == pytest.approx(row.speedup * base.devices / row.devices)
            if row.devices == base.devices:
                assert row.speedup == pytest.approx(1)
            if row.devices < base.devices:
                assert row.price.layout.offload


def test_a_row_reads_the_same_whatever_stands_around_it(plans):
    for found in plans[:4]:
        last = found.rows[-1]
        alone = plan(found.spec, found.target.name, [last.devices], price=1.5, samples=5000)
        assert alone.rows[0].speedup == last.speedup
        assert alone.rows[0].efficiency == last.efficiency


def test_no_sentence_contradicts_the_table(plans):
    for found in plans:
        said = re.sub(r"\s+", " ", printed(found))
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
    assert "Amdahl" not in printed(found)


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
