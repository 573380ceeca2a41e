"""`paceline plan`: sums that must hold, rows beside each other, JSON with every term; see also `plan_consistency`."""

import json
import re
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest

import paceline
from paceline.config import build_spec
from paceline.planner.advice import explain_misfit
from paceline.planner.formulas.placement import Reduction
from paceline.planner.plan import plan
from paceline.planner.rows import HourlyRates, Requirements
from paceline.planner.show import render_plan
from plan_specs import LM_FILE, lm
from results import expect_error, render_text

ROOT = Path(__file__).resolve().parents[3]
AGNEWS = ROOT / "recipes" / "classifier_agnews.yaml"
V100 = ROOT / "recipes" / "clusters" / "v100_pcie_x4.yaml"
LM = LM_FILE.format(preset="7b", sequence=2048)


@pytest.fixture
def lm_file(tmp_path):
    file = tmp_path / "lm.yaml"
    file.write_text(LM)
    return file


@pytest.fixture
def ask(ask):
    return lambda *words: astuple(ask("plan", *words))[:3]


@pytest.fixture(scope="module")
def agnews():
    return plan(paceline.load(AGNEWS, ["train.precision=fp32"]), str(V100), price=2.0)


def test_cost_follows_from_hours_and_ceilings_are_above_every_speedup(agnews):
    for row in agnews.rows:
        in_steps_s = agnews.cost_model.steps * row.price.step_s
        assert row.hours == pytest.approx((in_steps_s + sum(row.pauses_s.values())) / 3600)
        assert 0 < row.pauses_s["evaluation_s"] < in_steps_s / 10
        assert row.pauses_s["checkpoint_s"] > 0
        assert row.energy_kwh == pytest.approx(0.3 * row.device_hours)
        assert row.co2_kg == pytest.approx(0.473 * row.energy_kwh)
    best = max(row.speedup for row in agnews.rows)
    assert min(agnews.ceilings.amdahl, agnews.ceilings.communication) > best


def test_every_number_of_the_advice_is_priced():
    sizes = ["model.width=512", "model.ffn=2048", "model.layers=6", "model.dropout=0", "train.global_batch=64"]
    spec = paceline.load(AGNEWS, ["train.precision=fp32", "parallel.strategy=ddp", *sizes])
    found = plan(spec, "4x1xV100+10Gb")
    most, advice = found.rows[-1], found.advice[0]
    assert most.speedup < 1
    assert advice.startswith(f"ddp on 4 devices will run at {most.speedup:.2g}× ")
    batch, claimed = re.search(r"batch to ([\d,]+) \(([\d.]+)×\)", advice).groups()
    larger = plan(spec.replace({"train.global_batch": int(batch.replace(",", ""))}), "4x1xV100+10Gb", [1, 4])
    assert larger.rows[-1].speedup == pytest.approx(float(claimed), rel=0.06)
    claimed = float(re.search(r"8 steps \(([\d.]+)×\)", advice)[1])
    local = replace(found.cost_model, reduction=Reduction("local_sgd", 8)).price(most.price.layout, most.price.where)
    assert found.base.step_s / local.step_s == pytest.approx(claimed, rel=0.06)


def test_compression_and_local_steps_are_priced():
    spec = paceline.load(AGNEWS, ["train.precision=fp32", "parallel.strategy=ddp"])
    comm_s = {}
    for reduce in ("exact", "bf16", "powersgd", "local_sgd"):
        found = plan(spec.replace({"parallel.reduce": reduce}), "4x1xV100+1Gb", [4])
        comm_s[reduce] = found.rows[0].price.time.comm_s
    assert comm_s["bf16"] == pytest.approx(comm_s["exact"] / 2, rel=0.05)
    assert comm_s["powersgd"] < comm_s["exact"] / 4
    assert comm_s["local_sgd"] == pytest.approx(comm_s["exact"] / 8, rel=0.05)


def test_if_nothing_fits_there_is_nothing_to_apply(lm_file, ask):
    found = plan(paceline.load(lm_file, ["parallel.strategy=ddp"]), "4x24GB")
    assert not found.fits
    assert all(rejected.over_bytes > 0 for rejected in found.misfits[-1].rejected)
    with expect_error("does-not-fit"):
        found.overrides()
    code, out, _ = ask(lm_file, "--cluster", "2x24GB", "parallel.strategy=ddp")
    assert code == 1
    assert "✗" in out


def test_the_spot_price_of_the_catalogue_goes_with_its_price_alone_and_is_paid_if_asked_for(lm_file, ask):
    spec = paceline.load(lm_file)
    assert plan(spec, "8xH100", [8]).rates == HourlyRates(3.99, 2.15)
    assert plan(spec, "8xH100", [8], price=1.0).rates == HourlyRates(1.0, None)
    assert plan(spec, "8xH100", [8], price=HourlyRates(None, 1.0)).rates == HourlyRates(3.99, 1.0)
    row = plan(spec, "8xH100", [8], price=HourlyRates(2.0, 1.0)).rows[0]
    assert row.spot_usd == pytest.approx(row.cost_usd / 2)
    assert plan(spec, "8xH100", [8], price=0).rows[0].cost_usd == 0
    assert plan(spec, "8xA10", [8]).rows[0].cost_usd is None
    where = (lm_file, "--cluster", "8xH100")
    usual, spot = (json.loads(ask(*where, "--json", *more)[1])["rows"][-1] for more in ((), ("--spot",)))
    assert spot["cost_usd"] == pytest.approx(usual["spot_usd"])
    assert "(spot)" in ask(*where, "--spot")[1]
    with expect_error("missing-value", "--spot-price"):
        plan(lm_file, "8xH100", price=HourlyRates(1.0, None, take_spot=True))


# ── the command


def test_json_holds_every_term(ask, lm_file, tmp_path):
    code, out, _ = ask(lm_file, "--cluster", "8xH100", "--devices", "4,8", "--json", "--out", tmp_path / "out")
    values = json.loads(out)
    assert code == 0
    assert [row["devices"] for row in values["rows"]] == [4, 8]
    assert values["rows"][1]["refused"]
    assert values["physics"]["launch_s"] > 0
    assert values["cluster"]["source"]
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == values


def test_numbers_of_devices_that_are_not_whole_nodes_are_listed():
    found = plan(paceline.load(AGNEWS), "2x4xA100", [3, 7])
    assert [row.devices for row in found.rows] == [3]
    assert [rejected.devices for rejected in found.impossible] == [7]


@pytest.mark.parametrize("run", ["agnews", "lm"])
def test_a_plan_does_not_import_torch(lm_file, run):
    file = AGNEWS if run == "agnews" else lm_file
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "plan", str(file), "--cluster", "4xA100", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compute_s" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_the_cluster_of_the_run_file_is_used(tmp_path):
    (tmp_path / "mine.yaml").write_text("device: A100\nper_node: 2\n")
    (tmp_path / "run.yaml").write_text(f"{LM}cluster: mine.yaml\n")
    spec = paceline.load(tmp_path / "run.yaml")
    assert plan(spec).target.devices == 2
    assert plan(spec.replace({"cluster": "4xA100"})).target.devices == 4


@pytest.mark.parametrize(("strategy", "more"), [("fsdp", True), ("zero1", False), ("ddp", False)])
def test_more_devices_are_advised_only_where_they_divide_what_does_not_fit(strategy, more):
    spec = paceline.load(ROOT / "recipes/lm_7b.yaml", [f"parallel.strategy={strategy}", "parallel.offload=false"])
    found = paceline.plan(spec, cluster="2xV100-SXM2-16GB")
    assert not found.rows
    assert any("more devices" in line for line in explain_misfit(found)) == more


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        (("fits", "step_s<1e9", "hours >= 0.001"), 0),
        (("step_s<1e-9",), 1),
        (("total_bytes>1e15",), 1),
        *[((claim,), 2) for claim in ("steps_s<1", "step_s", "step_s<x", "step_s<1e")],
    ],
)
def test_assertions_decide_the_exit_code(ask, lm_file, claims, code):
    found, _, error = ask(lm_file, "--cluster", "8xH100", "--devices", "8", *[f"--assert={claim}" for claim in claims])
    assert found == code
    assert error.count("\n") == (code > 0)


@pytest.mark.parametrize(
    ("asked", "verdict"), [({"deadline_h": 1e-6}, "too late"), ({"budget_usd": 1e-6}, "over budget")]
)
def test_requirements_that_no_row_meets(asked, verdict):
    spec, requirements = lm("gpt2", 64, 512, 50257), Requirements(**asked)
    found = plan(spec, "4xA100", requirements=requirements)
    assert {found.ranking.verdict(row) for row in found.rows} == {verdict}
    assert found.chosen is (found.ranking.fastest if "deadline_h" in asked else found.ranking.cheapest)
    with expect_error("missing-value"):
        plan(spec.replace({"train.steps": None, "train.epochs": 1}), "4xA100", requirements=requirements)


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
    spec = build_spec({"train": {"steps": 500, "global_batch": 16, "precision": "bf16"}})
    found = plan(spec, "4xV100@pcie", samples=5000)
    assert found.chosen.devices == 1
    assert found.break_even is None
    assert found.rows[-1].price.time.compute_s > found.base.time.compute_s
    assert any("CUDA graph" in line for line in found.advice)


def test_a_run_file_that_fixes_two_devices_is_not_called_too_large():
    found = plan(lm("gpt2", 64, 512, 50257, parallel={"tensor": 2, "ranks": 2}), "4xA100")
    assert found.base.devices == 2
    assert not any("too small" in line for line in found.advice)
