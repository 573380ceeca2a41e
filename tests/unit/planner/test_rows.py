"""The rows of a plan beside each other: sums and sentences that hold for every run, cluster and wish."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

import paceline
from paceline.config import build_spec
from paceline.planner.plan import plan
from paceline.planner.rows import EQUALLY_FAST, Requirements
from paceline.planner.show import render_plan

CLUSTERS = ("4xV100@pcie", "8xA100", "4x4090", "2x8xH100", "4x1xV100+1Gb", "3xL40S", "8xA100@0.5GB/s", "2x4xT4+10Gb")
MODELS = (
    {"workload": "classifier", "model": {"width": 128, "heads": 4, "layers": 2, "ffn": 512}},
    {"workload": "classifier", "model": {"width": 768, "heads": 12, "layers": 12, "ffn": 3072}},
    {"workload": "lm", "model": {"preset": "gpt2"}, "data": {"sequence": 512, "vocab": 50257}},
    {"workload": "lm", "model": {"preset": "7b"}, "data": {"sequence": 2048, "vocab": 32000}},
)
WISHES = (
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
    return plan(build_spec(values), cluster, price=1.5, samples=5000, wishes=WISHES[place // 2 % len(WISHES)])


@pytest.fixture(scope="module")
def plans():
    return [found for found in map(planned, range(12)) if found.fits]


def printed(found):
    out = io.StringIO()
    for part in render_plan(found):
        Console(file=out, width=100).print(part)
    return out.getvalue()


def test_the_tick_is_what_was_asked_for(plans):
    for found in plans:
        chosen, wishes = found.chosen, found.wishes
        kept = [row for row in found.rows if not wishes.violation_of(row)]
        if wishes.deadline_h is not None and kept:
            assert chosen.cost_usd == min(row.cost_usd for row in kept)
        elif kept:
            assert chosen.run_s <= EQUALLY_FAST * min(row.run_s for row in kept)
            fewer = [row for row in kept if row.devices < chosen.devices]
            assert all(row.run_s > EQUALLY_FAST * min(r.run_s for r in kept) for row in fewer)
        else:
            assert "no row keeps to" in printed(found)


def test_the_best_rows_are_the_best(plans):
    for found in plans:
        rows, choice = found.rows, found.choice
        assert choice.cheapest.cost_usd == min(row.cost_usd for row in rows)
        assert choice.fastest.hours == min(row.hours for row in rows)
        assert choice.most_efficient.efficiency == max(row.efficiency for row in rows)
        assert choice.knee.hours * choice.knee.cost_usd == min(row.hours * row.cost_usd for row in rows)
        assert choice.relative_cost(choice.cheapest) == 1
        assert not choice.gains_nothing(choice.fastest)
        assert not choice.gains_nothing(choice.cheapest)
        front = [row for row in rows if not choice.gains_nothing(row)]
        assert all(a.hours > b.hours and a.cost_usd < b.cost_usd for a, b in pairwise(front))


def test_speedups_are_over_one_named_thing_that_there_is(plans):
    for found in plans:
        base = found.base
        assert base.fits
        said = printed(found)
        assert f"speed-ups are over {'one device' if base.devices == 1 else base.devices}" in said
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
        alone = plan(found.spec, found.site.name, [last.devices], price=1.5, samples=5000)
        assert alone.rows[0].speedup == last.speedup
        assert alone.rows[0].efficiency == last.efficiency


def test_no_sentence_contradicts_the_table(plans):
    for found in plans:
        said = re.sub(r"\s+", " ", printed(found))
        for row in found.rows:
            assert ("gathered layers" in said) == (found.chosen.price.layout.strategy in ("fsdp", "hsdp"))
            if row.devices == 1:
                assert "does not fit on one" not in said.split("→ ", 1)[1]
        longer = found.rows[-1].price.time.compute_s > found.base.time.compute_s
        assert longer == ("mostly launches" in said)
        assert said.count("✓ is the") <= 1


def test_a_machine_is_paid_for_once():
    """However many ranks share it: the faster row costs less, and none is cheap and called slower."""
    small = {"name": "some", "train": {"steps": 500, "global_batch": 256}, **MODELS[0]}
    found = plan(build_spec(small), "local", [1, 2], 2.0, samples=5000)
    for row in found.rows:
        assert row.cost_usd == pytest.approx(2.0 * row.hours)
    assert {found.choice.verdict(row) for row in found.rows} == {"fastest", "slower"}
    assert found.choice.fastest is found.choice.cheapest
    assert "2 USD per machine and hour" in printed(found)
    assert "Amdahl" not in printed(found)


def test_more_devices_that_compute_for_longer_are_explained():
    """Four V100s: 12 ms of kernels launched one by one, against 3 ms of a graph on one."""
    found = planned(0)
    assert found.rows[-1].price.time.compute_s > found.base.time.compute_s
    assert any("one device replays its step as one CUDA graph" in line for line in found.advice)


def test_a_run_file_that_insists_on_two_devices_is_not_called_too_large():
    values = {"name": "small", **MODELS[2], "train": {"steps": 500, "global_batch": 64, "precision": "bf16"}}
    found = plan(build_spec({**values, "parallel": {"tensor": 2, "ranks": 2}}), "4xA100")
    assert found.base.devices == 2
    assert not any("does not fit" in line for line in found.advice)
    assert "the fewest that hold it as the run file insists" in re.sub(r"\s+", " ", printed(found))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Requirements(min_efficiency=1.5),
            "--min-efficiency: 1.5 is not possible; give more than 0 and at most 1",
        ),
        (lambda: Requirements(budget_usd=0), "--budget: 0 is not possible"),
        (lambda: Requirements(deadline_h=float("nan")), "--deadline: nan is not possible"),
    ],
)
def test_wishes_that_cannot_be_are_refused(make, said):
    with pytest.raises(paceline.UserError, match=re.escape(said)):
        make()


def test_wishes_about_what_is_not_known_are_refused(tmp_path):
    spec = build_spec(
        {"name": "some", "workload": "classifier", "data": {"cache": str(tmp_path)}}
    )  # nothing was read yet
    with pytest.raises(paceline.UserError, match="how long the run is, is not known"):
        plan(spec, "2xA100", wishes=Requirements(deadline_h=1))
    with pytest.raises(paceline.UserError, match="--price USD"):
        plan(spec.replace({"train.steps": 10}), "2xA10", wishes=Requirements(budget_usd=1))
