"""Runs side by side: curves as they went on, what changed, which was best, folders of runs, and the listing."""

import csv
import json

import pytest

from paceline.reports.charts import build_charts, build_curves
from paceline.reports.contents import gather_contents
from paceline.reports.page import render_page
from paceline.reports.report import build_tables, write_tables
from paceline.reports.run_view import compare_experiments, read_run_view
from paceline.runlog.summary import find_score
from report_runs import change_events, make_run


def evaluated(path, accuracy, every=20):
    """The same run as if it had been evaluated now and then, on a device whose use was noted."""

    def change(event):
        if event["kind"] != "step":
            return event
        step, about = event["step"], {"t": event["t"], "step": event["step"]}
        event["lr"] = 1e-3 / step
        scores = {"n": 64, "loss": 0.5, "accuracy": accuracy * step / 60}
        used = {"device_share": 0.5, "device_watts": 300.0, "device_bytes": 1e9}
        noted = [{"kind": "evaluate", **about, **scores}, {"kind": "usage", **about, **used}]
        return [event, *(noted if step % every == 0 else [])]

    summary = json.loads((path / "summary.json").read_text())
    best = {"step": 60, "loss": 0.5, "accuracy": accuracy}
    summary |= {"metrics": {"loss": 0.5, "accuracy": accuracy}, "best": best, "score": "accuracy"}
    (path / "summary.json").write_text(json.dumps(summary))
    return change_events(path, change)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    evaluated(make_run(out, "slow", **{"train.lr": 1e-4}), 0.8)
    evaluated(make_run(out, "fast", **{"train.lr": 1e-3}), 0.9)
    unseen = make_run(out, "unseen", **{"train.lr": 1e-2, "train.seed": 3}) / "summary.json"
    unseen.write_text(json.dumps({**json.loads(unseen.read_text()), "metrics": {}}))
    return out


def test_curves_have_the_numbers_of_the_events_and_their_lines(folder):
    run = read_run_view(folder / "fast")
    found = {chart.name: chart for chart in build_curves([run])}
    assert list(found) == ["evaluation", "rate", "compute", "lr", "gradient", "usage"]
    lines = [json.loads(line) for line in run.file.read_text().splitlines()]
    for name, key in (("evaluation", "accuracy"), ("lr", "lr")):
        (line,) = found[name].data["lines"]
        for step, value, at in line["points"]:
            assert lines[at - 1]["step"] == step
            assert value == pytest.approx(lines[at - 1][key], rel=1e-4)
    (rate,) = found["rate"].data["lines"]
    assert rate["points"][0][1] == pytest.approx(64 / lines[1]["step_s"], rel=1e-3)
    names = [line["name"] for line in found["usage"].data["lines"]]
    assert names == ["in use, at most 50 %", "power, at most 300 W", "memory, at most 1 GB"]


def test_the_best_is_named_with_what_it_was_asked(folder):
    found = compare_experiments([read_run_view(folder / name) for name in ("slow", "fast", "unseen")])
    assert [run.name for run in found.runs] == ["fast", "slow", "unseen"]
    assert found.keys == ("train.lr", "train.seed")
    assert found.text == "fast has the highest accuracy, 0.9 with train.lr=0.001, train.seed=0; next is slow, 0.8."
    assert found.scores[2] is None


def test_other_test_sets_are_cautioned_against(folder, tmp_path):
    views = [read_run_view(folder / name) for name in ("slow", "fast")]
    assert compare_experiments(views).caution == ""
    other = evaluated(make_run(tmp_path, "other", **{"data.limit": 320}), 0.95)
    assert "(data.limit)" in compare_experiments([*views, read_run_view(other)]).caution


def test_scores_of_another_kind_are_not_compared(folder, tmp_path):
    both = [read_run_view(folder / "slow"), read_run_view(make_run(tmp_path, "other"))]
    assert [find_score(run.summary).name for run in both] == ["accuracy", "loss"]
    assert compare_experiments(both).best is None
    assert compare_experiments(both).text == ""


def test_a_folder_of_runs_is_one_page_with_its_tables_as_csv(folder, tmp_path):
    contents = gather_contents([folder])
    assert [run.name for run in contents.runs] == ["fast", "slow", "unseen"]
    shown = build_tables(contents)
    write_tables(shown, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"experiments.csv"}
    with open(tmp_path / "experiments.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["run", "train.lr", "train.seed", "accuracy ↑", "at step"]
    assert [row[0] for row in rows] == ["fast", "slow", "unseen"]
    text = render_page(contents, build_charts(contents), shown)
    assert "What changed, and what came of it" in text
    assert "The same training" not in text


def test_runs_of_other_workloads_are_named_and_left_out(tmp_path):
    *_, other = (make_run(tmp_path, name) for name in "abc")
    spec = (other / "spec.yaml").read_text()
    (other / "spec.yaml").write_text(spec.replace("workload: classifier", "workload: mine.py:Mine"))
    found = gather_contents([tmp_path])
    assert [run.name for run in found.runs] == ["a", "b"]
    assert "c (mine.py:Mine)" in found.left_out[0]


def test_runs_are_listed_and_compared(folder, ask, tmp_path):
    out = ask("runs", folder).out
    assert {line.split()[0] for line in out.splitlines()[1:]} == {"slow", "fast", "unseen"}
    out = ask("runs", folder / "slow", folder / "fast").out
    assert out.startswith("fast has the highest accuracy")
    assert out.splitlines()[2].startswith("✓  fast")
    assert {row["name"] for row in json.loads(ask("runs", folder, "--json").out)} == {"slow", "fast", "unseen"}
    first, *_ = json.loads(ask("runs", folder, "--compare", "--json").out)
    assert first["changed"]["train.lr"] == "0.001"
    assert ask("runs", tmp_path / "none").code == 2
