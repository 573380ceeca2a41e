"""A measured machine: fits of made-up measurements, plans that use them, and one quick real measurement."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.io.files import write_json
from paceline.planner.calibration import calibrate
from paceline.planner.calibration.calibrate import CPU_MATMULS, product_name
from paceline.planner.calibration.calibration import (
    CALIBRATION_FORMAT,
    default_calibration_path,
    describe_calibration_file,
    read_calibration,
)
from paceline.planner.plan import plan
from paceline.planner.target import resolve_target
from results import expect_error

PEAK = 50e9
FACTS = {"host": "desk", "cpu": "made up", "cores": 2, "memory_bytes": 16e9, "date": "2026-01-01", "torch": "2"}
ROOT = Path(__file__).resolve().parents[4]


def made_up(ranks, crowd=1.0, half=0.4):
    """A machine whose products reach PEAK, with half of it at 0.4 tiles, and whose ring moves 1 GB/s after 1 ms."""
    matmuls = []
    for m, k, n in CPU_MATMULS:
        tiles = math.ceil(m / 128) * math.ceil(n / 128)
        matmuls.append([m, k, n, PEAK / crowd * tiles / (tiles + half)])
    sent = [4e3, 4e6, 1.6e7]
    reduces = [[s, 1e-3 + 2 * (ranks - 1) / ranks * s / 1e9] for s in sent] if ranks > 1 else []
    return {
        "ranks": ranks,
        "threads": 1,
        "matmuls": matmuls,
        "attention_flops_s": 20e9 / crowd,
        "moved_bytes_s": 8e9 / crowd,
        "update_bytes_s": 10e9 / crowd,
        "launch_s": 1e-6 * crowd,
        "layer_s": 0.04 * crowd,
        "all_reduces": reduces,
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "calibration.json"
    rows = [made_up(1), made_up(2), made_up(4, crowd=2.0)]
    write_json(path, {"format": CALIBRATION_FORMAT, **FACTS, "measured": rows})
    return path


def classifier(*words):
    recipe = ROOT / "recipes/classifier_docstrings.yaml"
    return paceline.load(recipe, [*words, "train.epochs=null", "train.steps=100"])


def test_fits_find_what_was_put_in(file):
    two = read_calibration(file).nearest(2)
    assert two.matmul_fit() == pytest.approx((PEAK, 0.4))
    call_s, ring = two.all_reduce_fit()
    assert call_s == pytest.approx(1e-3, rel=0.01)
    assert ring == pytest.approx(1e9, rel=0.01)


def test_the_nearest_number_of_ranks_counts(file):
    found = read_calibration(file)
    assert [found.nearest(n).ranks for n in (1, 2, 3, 4, 16)] == [1, 2, 4, 4, 4]


def test_a_local_plan_uses_the_file_and_says_so(file):
    found = plan(classifier("parallel.strategy=ddp"), "local", [1, 2, 4], calibration=file)
    assert found.target.calibrated == str(file)
    one, two, four = found.rows
    assert two.speedup == pytest.approx(2, rel=0.1)  # two cores
    assert four.speedup == pytest.approx(two.speedup, rel=0.15)  # four ranks take turns on them
    assert two.price.time.comm_s == pytest.approx(1e-3 + found.cost_model.params * 4 / 1e9, rel=0.1)
    assert one.price.time.comm_s == 0


def test_slow_links_between_calibrated_ranks_are_priced_at_their_rate(file):
    spec = classifier("parallel.strategy=ddp")
    found = plan(spec, "4x1xlocal+100Mb", [2], calibration=file)
    wire_s = found.cost_model.params * 4 * 8 / (100e6 * 0.95)
    assert found.rows[0].price.time.comm_s == pytest.approx(wire_s, rel=0.02)
    assert found.rows[0].speedup < plan(spec, "local", [2], calibration=file).rows[0].speedup


def test_without_a_calibration_cores_share_nominal_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    target = resolve_target("local")
    if not target.shared:
        pytest.skip("this machine has devices of the catalogue")
    assert target.calibration is None
    part, whole = target.at(2).cluster.device, target.at(1).cluster.device
    assert part.flops_s["fp32"] == whole.flops_s["fp32"] / 2
    with expect_error("not-found", "--calibration"):
        resolve_target("2x1xlocal+1Gb")


def test_ranks_without_cores_take_turns():
    names = ["attention", "moved", "update", "launches", "layer", *(product_name(*sides) for sides in CPU_MATMULS)]
    rates, reduces = {2: dict.fromkeys(names, 8.0)}, {4: [0.1, 0.2, 0.3, 0.4]}
    row = calibrate._average_ranks(4, 1, [(rates, reduces)] * 4, most=2, cores=2)
    assert row["moved_bytes_s"] == 4
    assert row["launch_s"] == 1 / 4
    assert [s for _, s in row["all_reduces"]] == reduces[4]


def test_a_real_measurement_can_be_planned_with(tmp_path):
    path = tmp_path / "real.json"
    write_json(path, calibrate.calibrate_machine([1, 2], lambda text: None, threads=1, enough_s=0.01))
    found = read_calibration(path)
    assert [row.ranks for row in found.measured] == [1, 2]
    for row in found.measured:
        assert 1e8 < row.matmul_fit()[0] < 1e13
        assert 1e7 < row.moved_bytes_s < 1e12
        assert 1e-8 < row.launch_s < 1e-3
    call_s, ring = found.measured[1].all_reduce_fit()
    assert 1e-6 < call_s < 10
    assert ring > 1e5
    assert len(calibrate.build_calibration_table(path).rows) == 2
    assert plan(classifier(), "local", [1, 2], calibration=path).chosen is not None


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_calibrates_before_it_plans_and_plans_with_that(file, monkeypatch, tmp_path, ask):
    """The commands are those of the Makefile; what it would measure is made up."""
    dry = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [words.split() for words in re.findall(r"^\S*/paceline (.+)$", dry, re.MULTILINE)]
    verbs = [verb for verb, *_ in commands]
    assert verbs.count("calibrate") == verbs.count("plan") == 1
    assert verbs.index("calibrate") < verbs.index("plan") < verbs.index("measure")
    calibrates, plans, measures = (dict(zip(verbs, commands, strict=True))[v] for v in ("calibrate", "plan", "measure"))
    ranks = calibrates[calibrates.index("--ranks") + 1]
    assert ranks == plans[plans.index("--devices") + 1] == measures[measures.index("--ranks") + 1]
    monkeypatch.setenv("HOME", str(tmp_path))
    if not resolve_target("local").shared:
        pytest.skip("this machine has devices of the catalogue")
    monkeypatch.chdir(ROOT)
    assert "--out" not in calibrates, "a plan looks for it in the usual place"
    guess = json.loads(ask(*plans, "--json").out)
    default_calibration_path().parent.mkdir(parents=True)
    file.rename(default_calibration_path())
    planned = json.loads(ask(*plans, "--json").out)
    assert [found["cluster"]["calibration"] for found in (guess, planned)] == [None, str(default_calibration_path())]
    for before, after in zip(guess["rows"], planned["rows"], strict=True):
        assert before["time"]["step_s"] != after["time"]["step_s"]


def test_the_use_of_a_calibration_is_described(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "plans for cluster: local use it" in describe_calibration_file(default_calibration_path())
    assert describe_calibration_file(tmp_path / "a b.json").endswith(f"--calibration '{tmp_path}/a b.json'")
