"""A measurement written back as calibration: the factors of made-up rows, and plans that then take as long."""

import json
import shutil
import socket

import pytest

from paceline.errors import UserError
from paceline.io.files import read_json, write_json
from paceline.measurement.recalibration import update_calibration
from paceline.measurement.result import read_measurement
from paceline.planner.calibration.calibration import CALIBRATION_FORMAT, Correction, RankCorrection, read_calibration
from paceline.planner.plan import plan
from paceline.runlog.run_dir import RunDir
from report_runs import make_measurement
from results import expect_error
from unit.planner.calibration.test_calibration import made_up


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return make_measurement(tmp_path_factory.mktemp("runs") / "docstrings-measure", {1: 0.1, 2: 0.058})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "calibration.json"
    facts = {"cpu": "made up", "cores": 2, "memory_bytes": 16e9, "date": "2026-01-01", "torch": "2"}
    write_json(
        path,
        {"format": CALIBRATION_FORMAT, "host": socket.gethostname(), **facts, "measured": [made_up(1), made_up(2)]},
    )
    return path


def test_a_plan_then_takes_as_long_as_the_rows_did(measured, file):
    probed = read_json(file)
    correction, rows = update_calibration(measured, file)
    assert {name: read_json(file)[name] for name in probed} == probed  # what was probed stays beside it
    assert read_calibration(file).correction == correction
    assert correction.origin == measured.name
    for row in rows:
        assert row.after_s == pytest.approx(row.step_s, rel=0.03)
        assert row.before_s != pytest.approx(row.step_s, rel=0.1)
    for row in read_measurement(measured).rows[:2]:
        spec = RunDir.open(measured / row.runs[0]).spec().replace({"parallel.strategy": "ddp"})
        found = next(
            r for r in plan(spec, "local", [row.ranks], calibration=file).rows if r.price.layout.ranks == row.ranks
        )
        assert found.price.step_s == pytest.approx(row.step_s, rel=0.03)
        assert found.price.time.exposed_s + found.price.time.waiting_s == pytest.approx(row.parts.exposed_s, abs=1e-4)
    again, _ = update_calibration(measured, file)
    assert [row.compute for row in again.rows] == pytest.approx([row.compute for row in correction.rows], rel=1e-3)


def test_the_nearest_row_that_says_something_counts():
    found = Correction(
        "m", "d", (RankCorrection(1, 1.5, None), RankCorrection(2, 2.0, 3.0), RankCorrection(8, 4.0, 5.0))
    )
    assert [found.at(n) for n in (1, 2, 8, 64)] == [(1.5, 3.0), (2.0, 3.0), (4.0, 5.0), (4.0, 5.0)]
    assert Correction("m", "d", (RankCorrection(1, 1.5, None),)).at(4) == (1.5, 1.0)


def test_the_command_and_what_a_plan_says_of_it(measured, file, ask, tmp_path):
    calibrated = ask("calibrate", "--from", measured, "--out", file)
    planned = ask("plan", measured / "1-rank-1" / "spec.yaml", "--calibration", file)
    for answer in (calibrated, planned):
        assert (answer.code, "corrected by" in answer.out) == (0, True)
    assert ask("calibrate", "--from", measured, "--out", tmp_path / "none.json").code == 2


def test_what_cannot_be(measured, file, tmp_path):
    values = read_json(file)
    write_json(file, {**values, "host": "elsewhere"})
    with expect_error("conflict"):
        update_calibration(measured, file)
    for rows in ([], [{"ranks": 1, "compute": -1, "communication": None}], [{"ranks": 1}], [3]):
        write_json(file, {**values, "correction": {"origin": "m", "date": "d", "rows": rows}})
        with expect_error("damaged"):
            read_calibration(file)
    write_json(file, values)
    gpu = tmp_path / "gpu"
    shutil.copytree(measured, gpu)
    events = gpu / "1-rank-1" / "events" / "rank0.jsonl"
    first, *rest = events.read_text().splitlines()
    events.write_text("\n".join([json.dumps({**json.loads(first), "device": "cuda"}), *rest]) + "\n")
    with pytest.raises(UserError, match="ran on cuda"):
        update_calibration(gpu, file)
    assert "correction" not in read_json(file)
