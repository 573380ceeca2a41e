"""The verb plan: sums that must hold, tables in 100 columns, JSON with every term, bad requests in one line."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import main
from paceline.planner.formulas.placement import Reduction
from paceline.planner.plan import plan
from paceline.planner.rows import HourlyRates

ROOT = Path(__file__).resolve().parents[3]
AGNEWS = ROOT / "recipes" / "classifier_agnews.yaml"
V100 = ROOT / "recipes" / "clusters" / "v100_pcie_x4.yaml"
LM = """name: lm
workload: lm
model: {preset: 7b}
data: {sequence: 2048, vocab: 32000}
train: {steps: 1000, global_batch: 64, precision: bf16}
"""


@pytest.fixture
def lm_file(tmp_path):
    file = tmp_path / "lm.yaml"
    file.write_text(LM)
    return file


@pytest.fixture
def ask(capsys):
    def ask(*words):
        with pytest.raises(SystemExit) as left:
            main(["plan", *map(str, words)])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return ask


@pytest.fixture(scope="module")
def agnews():
    return plan(paceline.load(AGNEWS, ["train.precision=fp32"]), str(V100), price=2.0)


def test_money_follows_from_hours(agnews):
    for row in agnews.rows:
        in_steps_s = agnews.subject.steps * row.price.step_s
        assert row.hours == pytest.approx((in_steps_s + sum(row.pauses_s.values())) / 3600)
        assert 0 < row.pauses_s["evaluation_s"] < in_steps_s / 10
        assert row.pauses_s["checkpoint_s"] > 0
        assert row.device_hours == pytest.approx(row.devices * row.hours)
        assert row.cost_usd == pytest.approx(2.0 * row.device_hours)
        assert row.energy_kwh == pytest.approx(0.3 * row.device_hours)
        assert row.efficiency == pytest.approx(row.speedup / row.devices)
    assert agnews.rows[0].speedup == pytest.approx(1)
    assert agnews.choice.cheapest is min(agnews.rows, key=lambda row: row.device_hours)
    assert agnews.choice.fastest is min(agnews.rows, key=lambda row: row.hours)


def test_terms_of_every_row_add_up(agnews):
    values = agnews.as_json()
    for row in values["rows"]:
        times = row["time"]
        parts = [times[name] for name in times if name not in ("comm_s", "step_s")]
        assert sum(parts) == pytest.approx(times["step_s"])
        memory = row["memory"]
        terms = [memory[k] for k in memory if k not in ("host_bytes", "total_bytes", "capacity_bytes")]
        assert sum(terms) == pytest.approx(memory["total_bytes"])
        assert {"data_s", "compute_s", "comm_s", "exposed_s", "step_s"} <= times.keys()
        assert row["layout"]["ranks"] == row["devices"]


def test_limits_of_the_speedup_are_above_it(agnews):
    best = max(row.speedup for row in agnews.rows)
    assert agnews.ceilings.amdahl > best
    assert agnews.ceilings.communication > best


def test_a_run_that_does_not_pay_is_told_what_would_help():
    """Every number of the sentence is priced."""
    sizes = ["model.width=512", "model.ffn=2048", "model.layers=6", "model.dropout=0", "train.global_batch=64"]
    spec = paceline.load(AGNEWS, ["train.precision=fp32", "parallel.strategy=ddp", *sizes])
    found = plan(spec, "4x1xV100+10Gb")
    most = found.rows[-1]
    assert most.speedup < 1
    advice = found.advice[0]
    said = f"ddp on 4 devices will run at {most.speedup:.2g}× the speed of one device: each step computes"
    assert advice.startswith(said)
    assert "Stay on one device" in advice
    batch = int(re.search(r"raise the batch to ([\d,]+)", advice)[1].replace(",", ""))
    larger = plan(spec.replace({"train.global_batch": batch}), "4x1xV100+10Gb", [1, 4])
    claimed = float(re.search(r"raise the batch to [\d,]+ \(([\d.]+)×\)", advice)[1])
    assert larger.rows[-1].speedup == pytest.approx(claimed, rel=0.06)
    claimed = float(re.search(r"local SGD every 8 steps \(([\d.]+)×\)", advice)[1])
    local = replace(found.subject, reduction=Reduction("local_sgd", 8)).price(most.price.layout, most.price.where)
    assert found.base.step_s / local.step_s == pytest.approx(claimed, rel=0.06)


def test_a_small_model_is_not_sped_up_by_devices_that_wait_for_launches():
    found = plan(paceline.load(AGNEWS), "4xA100")
    assert found.chosen.devices == 1
    assert found.break_even is None


def test_compression_and_local_steps_are_priced():
    spec = paceline.load(AGNEWS, ["train.precision=fp32", "parallel.strategy=ddp"])
    steps = {}
    for reduce in ("exact", "bf16", "powersgd", "local_sgd"):
        found = plan(spec.replace({"parallel.reduce": reduce}), "4x1xV100+1Gb", [4])
        steps[reduce] = found.rows[0].price.time.comm_s
    assert steps["bf16"] == pytest.approx(steps["exact"] / 2, rel=0.05)
    assert steps["powersgd"] < steps["exact"] / 4
    assert steps["local_sgd"] == pytest.approx(steps["exact"] / 8, rel=0.05)


def test_nothing_fits_says_by_how_much_it_is_missed(lm_file):
    found = plan(paceline.load(lm_file, ["parallel.strategy=ddp"]), "4x24GB")
    assert not found.fits
    assert "Nothing fits on 4 × A10. Nearest is" in found.advice[0]
    with pytest.raises(paceline.UserError, match="nothing fits"):
        found.overrides()


def test_a_spot_price_of_others_does_not_stand_beside_a_price_of_ones_own(lm_file):
    spec = paceline.load(lm_file)
    assert plan(spec, "8xH100", [8]).rates == HourlyRates(3.99, 2.15)
    assert plan(spec, "8xH100", [8], price=1.0).rates == HourlyRates(1.0, None)
    assert plan(spec, "8xH100", [8], price=HourlyRates(None, 1.0)).rates == HourlyRates(3.99, 1.0)
    row = plan(spec, "8xH100", [8], price=HourlyRates(2.0, 1.0)).rows[0]
    assert row.spot_usd == pytest.approx(row.cost_usd / 2)


def test_spot_devices_are_what_is_paid_for_where_they_are_asked_for(lm_file, ask):
    where = (lm_file, "--cluster", "8xH100")
    usual, spot = (json.loads(ask(*where, "--json", *more)[1])["rows"][-1] for more in ((), ("--spot",)))
    assert spot["cost_usd"] == pytest.approx(usual["spot_usd"])
    told = ask(*where, "--spot")[1]
    assert "USD per device and hour as spot" in told
    assert "spot devices may be taken away" in told
    code, _, err = ask(*where, "--price", "1", "--spot")
    assert code == 2
    assert "say it with  --spot-price USD" in err


def test_prices_of_the_catalogue_hold_unless_others_are_given(lm_file):
    spec = paceline.load(lm_file)
    assert plan(spec, "8xH100", [8]).usd_per_device_hour == 3.99
    assert plan(spec, "8xH100", [8], price=0).rows[0].cost_usd == 0
    assert plan(spec, "8xA10", [8]).rows[0].cost_usd is None


# ── the command


@pytest.mark.parametrize("where", [V100, "4x24GB", "2x8xH100", "2048x8xH100", "8xCPU"])
@pytest.mark.parametrize("run", ["agnews", "lm"])
def test_tables_fit_100_columns(ask, lm_file, run, where):
    code, out, _ = ask(AGNEWS if run == "agnews" else lm_file, "--cluster", where)
    assert code in (0, 1)
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out.replace("… ", "")  # nothing is cut off
    if code == 0:
        assert out.count("✓") == 2  # among the numbers of devices, and among the layouts
        assert "step_s" in out


def test_the_words_at_the_end_apply_the_plan(ask, lm_file):
    _, out, _ = ask(lm_file, "--cluster", "8xH100", "--devices", "8")
    words = re.findall(r"parallel\.\w+=\w+", out.split("→")[-1])
    spec = paceline.load(lm_file, words)
    assert spec.parallel.ranks == 8


def test_json_holds_every_term(ask, lm_file, tmp_path):
    code, out, _ = ask(lm_file, "--cluster", "8xH100", "--devices", "4,8", "--json", "--out", tmp_path / "out")
    values = json.loads(out)
    assert code == 0
    assert [row["devices"] for row in values["rows"]] == [4, 8]
    assert values["rows"][1]["refused"]
    assert values["physics"]["launch_s"] > 0
    assert values["cluster"]["source"]
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == values


def test_nothing_fits_leaves_with_1(ask, lm_file):
    code, out, _ = ask(lm_file, "--cluster", "2x24GB", "parallel.strategy=ddp")
    assert code == 1
    assert "✗" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "4xA1000"], "device 'A1000' is not in the catalogue"),
        (["--cluster", "0xA100"], "has no devices"),
        (["--devices", "0"], "--devices: 0 devices cannot train"),
        (["--devices", "two"], "is not a list of numbers"),
        (["--devices", "4", "--price", "-1"], "--price -1 is not an amount"),
        (["--price", "nan"], "--price nan is not an amount"),
        (["--spot-price", "-1"], "--spot-price -1 is not an amount"),
        (["--cluster", "nowhere.yaml"], "cluster file 'nowhere.yaml' does not exist"),
        (["--cluster", "sixteen"], "is not understood; write it as"),
        (["--cluster", "2x4xA100", "--devices", "3,7"], ""),
        (["--samples", "-5"], "--samples: -5 is not possible"),
        (["--cluster", "4xA100", "--calibration", "x.json"], "--calibration is of the machine it was made on"),
        (["cluster=4xA1000"], "cluster: device 'A1000' is not in the catalogue"),
    ],
)
def test_bad_requests_get_one_clear_line(ask, words, said):
    code, out, err = ask(AGNEWS, *words)
    if not said:
        assert "7 devices are not whole nodes of 4" in out
        return
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_sequence_longer_than_the_model_is_refused(ask, lm_file):
    code, _, err = ask(lm_file, "model.preset=gpt2", "model.vocab=50257")
    assert code == 2
    assert "data.sequence=2048 is longer than the 1024 learned positions" in err


def test_a_plan_for_a_laptop_starts_quickly():
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "plan", str(AGNEWS), "--cluster", "4xA100"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compute_s" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_the_cluster_of_the_run_file_is_used(tmp_path):
    (tmp_path / "mine.yaml").write_text("device: A100\nper_node: 2\n")
    (tmp_path / "run.yaml").write_text(f"{LM}cluster: mine.yaml\n")
    spec = paceline.load(tmp_path / "run.yaml")
    assert plan(spec).site.devices == 2
    assert plan(spec.replace({"cluster": "4xA100"})).site.devices == 4


def test_devices_of_a_catalogue_of_ones_own(tmp_path):
    columns = (ROOT / "src/paceline/hardware/hardware.csv").read_text().splitlines()[0]
    mine = "NPU-1,64,1000,,200,200,,50,,mesh,100,31,16,400,250,1.5,us,our own lab,2026-01-01"
    (tmp_path / "mine.csv").write_text(f"{columns}\n{mine}\n")
    (tmp_path / "lab.yaml").write_text("device: NPU-1\ncatalogue: mine.csv\nper_node: 16\n")
    found = plan(paceline.load(AGNEWS), str(tmp_path / "lab.yaml"))
    assert found.site.whole.device.name == "NPU-1"
    assert found.usd_per_device_hour == 1.5
    (tmp_path / "mine.csv").write_text("name,memory\nNPU-1,much\n")
    (tmp_path / "bad.yaml").write_text("device: NPU-1\ncatalogue: mine.csv\n")
    from paceline.hardware.catalogue import load_catalogue

    load_catalogue.cache_clear()
    with pytest.raises(paceline.UserError, match="is not a table of devices"):
        plan(paceline.load(AGNEWS), str(tmp_path / "bad.yaml"))


def test_every_cluster_file_of_the_recipes_is_read():
    from paceline.hardware.catalogue import read_cluster_file

    for file in (ROOT / "recipes" / "clusters").glob("*.yaml"):
        assert read_cluster_file(file).devices >= 4


def test_longer_steps_never_follow_from_faster_links(agnews):
    spec = paceline.load(AGNEWS, ["train.precision=fp32"])
    slow, fast = (plan(spec, f"4x1xV100+{speed}", [4]) for speed in ("1Gb", "100Gb"))
    assert fast.rows[0].speedup > slow.rows[0].speedup
    assert replace(fast.rows[0]) == fast.rows[0]


def test_a_plan_of_ranks_that_could_share_says_what_it_counts(lm_file, ask):
    said = "priced with a device for each rank; with parallel.backend=gloo ranks can share one"
    assert said in ask(lm_file, "parallel.backend=gloo", "--cluster", "2xH100")[1]
    assert said not in ask(lm_file, "--cluster", "2xH100")[1]
