"""A sweep from the first trial to the page: gone on with, taken apart for a job array, halved."""

import csv
import json
import threading

import pytest

import paceline
from paceline.config import build_spec
from paceline.errors import RunFailed, UserError
from paceline.reports.run_view import compare_experiments, read_run_view
from paceline.reports.sweep_page import build_sweep_charts
from paceline.runlog.run_dir import RunDir
from results import expect_error

GRID = ["model.max_depth=2,4", "model.learning_rate=0.1,0.5"]

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    data = {"rows": 600, "columns": 4, "cache": str(tmp_path_factory.mktemp("sweep") / "cache")}
    train, parallel = {"steps": 9, "log_every": 9}, {"threads": 1}
    return build_spec({"name": "trees", "workload": "trees", "data": data, "train": train, "parallel": parallel})


@pytest.fixture(scope="module")
def swept(trees, tmp_path_factory):
    return paceline.sweep(trees, GRID, out=tmp_path_factory.mktemp("out") / "grid")


def test_rows_are_best_first_and_the_files_say_the_same(swept):
    scores = [row.score for row in swept.rows]
    assert scores == sorted(scores)
    assert [row.values for row in swept.trials][1] == {"model.max_depth": 2, "model.learning_rate": 0.5}
    assert swept.best.values == swept.rows[0].values
    told = json.loads((swept.folder / "sweep.json").read_text())
    assert told["best"] == swept.best.number
    table = list(csv.DictReader((swept.folder / "sweep.csv").open()))
    assert [float(row["loss"]) for row in table] == scores
    page = (swept.folder / "sweep.html").read_text()
    assert f"(trial {swept.best.number})" in page
    assert f"{swept.folder / swept.best.run}/spec.yaml" in page
    charts = build_sweep_charts(swept)
    assert [chart.data["points"][0][2] for chart in charts] == [swept.best.number] * 2
    assert charts[1].data["points"][0][:2] == [swept.best.values["model.learning_rate"], swept.best.score]
    found = compare_experiments([read_run_view(swept.folder / row.run) for row in swept.trials])
    assert found.runs[found.best].path.name == swept.best.run
    assert (found.score, found.scores[found.best].value) == (swept.metric, swept.best.score)


def test_a_sweep_goes_on_where_it_was_and_never_with_another(swept, trees):
    before = {row.run: (swept.folder / row.run / "events/rank0.jsonl").stat().st_mtime_ns for row in swept.trials}
    told = json.loads((swept.folder / "sweep.json").read_text())
    told["trials"][1] |= {"status": "to do", "score": None}  # as if killed after its run, and before the note of it
    (swept.folder / "sweep.json").write_text(json.dumps(told))
    said = []
    again = paceline.sweep(trees, GRID, out=swept.folder, log=said.append)
    assert said == []
    assert again.trials == swept.trials
    assert before == {run: (swept.folder / run / "events/rank0.jsonl").stat().st_mtime_ns for run in before}
    with expect_error("conflict", "model.max_depth"):
        paceline.sweep(trees, ["model.max_depth=2,5", GRID[1]], out=swept.folder)


def test_halving_goes_on_with_the_best_and_repeats_nothing(trees, tmp_path):
    values = {"model.learning_rate": [0.001, 0.05, 0.6]}
    found = paceline.sweep(trees, values, out=tmp_path / "halved", halving=True)
    assert [row.status for row in found.trials] == ["dropped", "dropped", "finished"]
    assert found.best.values == {"model.learning_rate": 0.6}
    assert [length for length, _ in found.best.history] == [3, 9]
    events = [json.loads(line) for line in (tmp_path / "halved/trial-003/events/rank0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 10))
    assert RunDir(tmp_path / "halved/trial-003").spec().train.steps == 9


def test_a_trial_that_fails_is_a_row_and_can_be_tried_again(trees, tmp_path):
    table = tmp_path / "table.csv"
    values = {"data.path": [None, str(table)]}
    found = paceline.sweep(trees, values, out=tmp_path / "failing")
    failed = found.rows[-1]
    assert (failed.number, failed.status, failed.score) == (2, "failed", None)
    assert "no such file" in failed.why
    table.write_text("x,label\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(60)))
    assert paceline.sweep(trees, values, out=tmp_path / "failing").trials[1].status == "failed"
    again = paceline.sweep(trees, values, out=tmp_path / "failing", retry=True)
    assert [row.status for row in again.trials] == ["finished", "finished"]
    (chart,) = build_sweep_charts(again)
    assert sorted(point[0] for point in chart.data["points"]) == [0, 1]


def test_as_many_trials_as_asked_for_are_under_way_at_once(trees, tmp_path, monkeypatch):
    met, slots = threading.Barrier(2, timeout=60), set()

    def start(spec, folder, *, again, slot):
        met.wait()
        slots.add(slot)
        raise RunFailed(f"{spec.parallel.threads} threads")

    monkeypatch.setattr("paceline.trials.sweep.train_trial", start)
    with pytest.raises(RunFailed, match="threads"):
        paceline.sweep(trees.replace({"parallel.threads": 0}), GRID, out=tmp_path / "jobs", jobs=2)
    assert slots == {0, 1}


def test_a_job_of_an_array_trains_one_trial_and_the_table_finds_it(trees, tmp_path, ask):
    file, folder = RunDir.claim(tmp_path, "file", trees).spec_file, tmp_path / "array"
    words = ["sweep", file, "model.max_depth=2,3", "train.steps=3", "--out", folder]
    assert [ask(*words, *more).code for more in (("--trial", 3), ("--show",))] == [2, 2]
    assert not folder.exists()
    one = ask(*words, "--trial", 2)
    assert (one.code, one.out.startswith("trial 2 of 2: model.max_depth=3\n")) == (0, True)
    told = json.loads(ask(*words, "--show", "--json").out)
    assert [row["status"] for row in told["trials"]] == ["to do", "finished"]
    shown = ask(*words, "--show").out
    assert "lowest loss of 1 trial: " in shown
    assert "model.max_depth=3 (trial 2)" in shown
    assert ask(*words, "--trial", 1, "--halving").code == 2


def test_the_missing_library_is_named_with_the_line_to_type(trees, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match="pip install"):
        paceline.sweep(trees, GRID, search="optuna")
