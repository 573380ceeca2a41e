"""Members of two workloads become one model, trained by folds or finished."""

import json
import shutil
from dataclasses import replace

import pytest

import paceline
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.workload import build_workload
from paceline.workloads.ensemble.members import MemberOutputs
from results import expect_error


def finished(ensemble_run, tables, tmp_path, **given):
    """An ensemble of the members of that run, which are finished runs by themselves."""
    runs = [str(ensemble_run.path / "members" / name) for name in ("trees", "texts")]
    data = {"path": str(tables[1]), "label": "verdict"}
    return build_spec({"name": "again", "workload": "ensemble", "model": {"runs": runs}, "data": data}).replace(given)


def read_told(run):
    return json.loads((run.path / "ensemble.json").read_text())


def refused(spec, code, key=""):
    with expect_error(code, key):
        build_workload(spec).prepare(lambda text: None)


def test_the_ensemble_beats_both_members_and_says_how_surely(ensemble_run):
    told = read_told(ensemble_run)
    gains = told["held_out"]["gains"]
    assert gains.keys() == {"trees", "texts"}
    assert all(gain["loss"]["value"] > gain["loss"]["error"] > 0 for gain in gains.values())
    assert told["held_out"]["each"]["ensemble"]["loss"]["value"] == pytest.approx(ensemble_run.metrics["loss"])
    assert all(weight > 0.1 for weight in told["combination"]["weights"])


def test_no_member_learned_from_rows_that_it_was_asked_about(request_values, ensemble_run):
    request = build_workload(build_spec(request_values)).request
    for fold in range(2):
        learn, away = request.split(request.files[0], fold)
        assert not set(learn.numbers) & set(away.numbers)
        assert len(learn) + len(away) == 600
        assert list(away.numbers) == list(request.fit.numbers[request.fold == fold])
        asked = MemberOutputs.read(ensemble_run.path / "predictions" / f"trees-fold-{fold + 1}.npz")
        assert len(asked.values) == len(away)
    assert not (ensemble_run.path / "folds").exists()
    assert sorted(file.name for file in (ensemble_run.path / "tables").iterdir()) == ["learn.csv", "test.csv"]
    request = build_workload(build_spec(request_values | {"data": request_values["data"] | {"folds": 3}})).request
    stops = replace(request.files[0], spec=request.files[0].spec.replace({"train.patience": 2}))
    learn, looked_at = request.split(stops, 0)  # early stopping looks at a fold of its own
    asked = set(request.fit.numbers[request.fold == 0])
    assert not asked & (set(learn.numbers) | set(looked_at.numbers))
    assert not set(learn.numbers) & set(looked_at.numbers)


def test_it_predicts_rows_each_member_by_its_columns(ensemble_run, tables, tmp_path, ask):
    said = ask("predict", ensemble_run.path, tables[1], "--out", tmp_path / "said.csv")
    assert said.code == 0
    assert f"accuracy {ensemble_run.metrics['accuracy']:.4g}" in said.out
    model = paceline.open(ensemble_run.path)
    rows = [{"size": "3", "noise": "0", "words": "good lovely"}, {"size": "-3", "noise": "0", "words": "poor awful"}]
    assert model.predict(rows).labels == ["yes", "no"]
    with expect_error("unknown-name"):
        model.predict([{"size": "3", "noise": "0"}])
    assert ask("export", ensemble_run.path, "--out", tmp_path / "model").code == 2


def test_a_run_that_was_killed_goes_on_to_the_same_end(request_values, ensemble_run, tmp_path):
    copy = shutil.copytree(ensemble_run.path, tmp_path / "both")
    for file in ("ensemble.json", "summary.json", "predictions/texts-test.npz"):
        (copy / file).unlink()
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    whole, again = read_told(ensemble_run), read_told(paceline.resume(copy, show=False))
    assert again["combination"] == whole["combination"]
    assert again["held_out"] == whole["held_out"]


def test_finished_runs_are_weighed_on_rows_that_none_of_them_saw(ensemble_run, tables, tmp_path):
    wanted = {"model.combine": "weighted", "model.calibrate": "none"}
    found = paceline.train(finished(ensemble_run, tables, tmp_path, **wanted), tmp_path, show=False)
    told = read_told(found)
    assert sum(told["combination"]["weights"]) == pytest.approx(1)
    assert told["held_out"]["rows"] < 400
    run = ensemble_run.path / "members" / "texts" / "kept" / "more.txt"
    run.write_text("another model")
    try:
        with expect_error("conflict"):
            paceline.open(found.path)
    finally:
        run.unlink()


def test_rows_that_a_member_learned_from_are_refused_or_left_out(ensemble_run, tables, tmp_path):
    learned, unknown = tables
    said = []
    refused(finished(ensemble_run, tables, tmp_path, **{"data.path": str(learned)}), "invalid-data", "data.path")
    mixed = tmp_path / "mixed.csv"
    mixed.write_text(unknown.read_text() + "".join(learned.read_text().splitlines(keepends=True)[1:101]))
    work = build_workload(finished(ensemble_run, tables, tmp_path, **{"data.path": str(mixed)}))
    work.prepare(said.append)
    assert said == ["  100 of the 500 rows are left out: members were trained on them"]
    assert len(work.request.fit) + len(work.request.test) == 400


def test_labels_and_runs_that_do_not_fit_are_refused(ensemble_run, tables, make_table, tmp_path):
    def wrong(code, key="", **given):
        refused(finished(ensemble_run, tables, tmp_path, **given), code, key)

    wrong("conflict", "data.label", **{"data.label": "words"})
    wrong("not-supported", "train.steps", **{"train.steps": 3})
    copy = shutil.copytree(ensemble_run.path / "members" / "trees", tmp_path / "trees")
    (copy / "summary.json").unlink()
    wrong("invalid-request", **{"model.runs": [str(copy), str(ensemble_run.path / "members" / "texts")]})
    few = make_table(tmp_path / "few.csv", 12, 3)
    wrong("invalid-data", **{"data.path": str(few)})
    with expect_error("not-supported", "parallel"):
        paceline.train(finished(ensemble_run, tables, tmp_path, **{"parallel.ranks": 2}), tmp_path)
    with pytest.raises(UserError, match=r"model\.runs"):
        finished(ensemble_run, tables, tmp_path, **{"model.runs": [str(copy)]})
    with pytest.raises(UserError, match="paceline plan"):
        paceline.plan(finished(ensemble_run, tables, tmp_path))


def test_another_label_than_members_know_ends_before_anything_is_left(ensemble_run, tables, tmp_path):
    odd = tmp_path / "odd.csv"
    odd.write_text(tables[1].read_text().replace(",yes", ",perhaps"))
    spec = finished(ensemble_run, tables, tmp_path, **{"data.path": str(odd)})
    with expect_error("invalid-data", "data.label"):
        paceline.train(spec, tmp_path / "runs", show=False)
    assert not list((tmp_path / "runs").iterdir())


def test_a_class_that_folds_would_miss_is_refused(request_values, tables, tmp_path):
    rare = tmp_path / "rare.csv"
    lines = tables[0].read_text().splitlines()
    rare.write_text("\n".join([*lines, "0,0,good,never"]) + "\n")
    data = request_values["data"] | {"path": str(rare)}
    refused(build_spec(request_values | {"data": data}), "invalid-data", "data.folds")
    refused(build_spec({"workload": "ensemble"}), "missing-value", "model.members")
    refused(build_spec(request_values | {"data": {"label": "verdict"}}), "missing-value", "data.path")
