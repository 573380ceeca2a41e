"""Predictions of finished runs: they agree with the evaluation, and need nothing but the run folder."""

import csv
import json
import re
import shutil
from math import fsum

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline import UserError
from paceline.inference.trained_model import Predictions
from results import expect_error


def read(table):
    with open(table, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predictions_agree_with_the_evaluation_to_the_last_digit(classifier_run, tables):
    rows, trained = read(tables[1]), paceline.open(classifier_run.path)
    told, found = classifier_run.summary.evaluation, trained.predict([row["text"] for row in rows])
    names = list(trained.classes)
    labels = torch.tensor([names.index(row["label"]) for row in rows])
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels.numpy(), found.numbers), 1)
    assert confusion.tolist() == [list(row) for row in told.arrays["confusion"]]
    losses = F.cross_entropy(torch.from_numpy(found["logits"]), labels, reduction="none").double()
    lengths = trained.workload.vocabulary.encode([row["text"] for row in rows]).lengths
    chunks = [losses[part][np.argsort(lengths[part], kind="stable")] for part in (slice(0, 256), slice(256, 300))]
    assert fsum(chunk.sum().item() for chunk in chunks) / 300 == told.metrics["loss"]
    assert found.labels == [names[number] for number in found.probabilities.argmax(1)]
    assert repr(found) == "Predictions(probabilities [300, 3], logits [300, 3])"
    assert "3 classes" in repr(trained)


def test_a_table_comes_back_with_predictions_beside_it(classifier_run, tables, tmp_path, ask):
    answer = ask("predict", classifier_run.path, tables[1], "--out", tmp_path / "out.csv")
    assert f"accuracy {classifier_run.metrics['accuracy']:.4g}" in answer.out
    assert (answer.code, "(300 rows with a known label)" in answer.out) == (0, True)
    rows = read(tmp_path / "out.csv")
    assert list(rows[0]) == ["text", "label", "predicted", "probability", "p(money)", "p(sky)", "p(sport)"]
    right = np.mean([row["predicted"] == row["label"] for row in rows])
    assert right == pytest.approx(classifier_run.metrics["accuracy"])
    assert sum(float(rows[0][f"p({name})"]) for name in ("money", "sky", "sport")) == pytest.approx(1)


def test_texts_are_shown_with_their_class(classifier_run, tmp_path, ask):
    (tmp_path / "lines.txt").write_text("goal team match\nstar moon orbit\n", encoding="utf-8")
    typed = ask("predict", classifier_run.path, "goal team match", "star moon orbit")
    assert ask("predict", classifier_run.path, tmp_path / "lines.txt") == typed
    assert (typed.code, len(typed.out.splitlines())) == (0, 3)


def test_a_model_of_ones_own_predicts_rows(circle_run, circle_file, tmp_path, ask):
    points = circle_file.with_name("points.csv")
    assert ask("predict", circle_run.path, points, "--out", tmp_path / "out.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [row["name"] for row in rows] == ["centre", "far away", "close to the edge"]
    assert [row["predicted"] for row in rows[:2]] == ["inside", "outside"]
    found = paceline.open(circle_run.path).predict([(0.1, -0.2), (3, 1)])
    assert found.probabilities[:, 0].tolist() == pytest.approx([row["p(inside)"] for row in rows[:2]])


def test_own_code_that_is_gone_is_run_from_its_copy_only_when_named(circle_run, circle_file, capsys):
    text = circle_file.read_text(encoding="utf-8")
    copy = circle_run.path / "kept" / "source" / "circle.py"
    assert copy.read_text(encoding="utf-8") == text
    try:
        circle_file.write_text(f"{text}\n# changed\n", encoding="utf-8")
        paceline.open(circle_run.path)
        assert f"add  --code {copy}" in capsys.readouterr().err
        circle_file.unlink()
        with expect_error("not-found", "--code") as error:
            paceline.open(circle_run.path)
        assert str(error.value).endswith(f"--code {copy}")
        assert len(paceline.open(circle_run.path, code=copy).predict([(0, 0)])) == 1
    finally:
        circle_file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.csv",), "inputs=missing.csv: no such file"),
        ((__file__,), "test_predict.py' is a file"),
        (("TABLE", "--column", "txt"), "no column 'txt', did you mean 'text'?"),
        (("TABLE", "more"), "is a table; give no"),
        (("TABLE", "--out", "x.xls"), "x.csv"),
        (("a text", "--out", "masks"), "masks.csv"),
        (("TABLE", "--out", "no/x.csv"), "there is no folder 'no'; make it with  mkdir -p no"),
        (("a text", "--code", "no.py"), "--code no.py: there is no such file"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(classifier_run, tables, words, said, ask):
    answer = ask("predict", classifier_run.path, *(tables[1] if word == "TABLE" else word for word in words))
    assert (answer.code, said in answer.err) == (2, True)


def test_a_workload_without_predictions_says_what_to_use(lm_run):
    with expect_error("not-supported", match="use  paceline sample"):
        paceline.open(lm_run.path).predict(["a text"])


def test_predictions_without_classes_are_taken_by_name():
    found = Predictions({"mask": np.zeros((2, 4, 4), np.uint8)})
    assert found["mask"].shape == (2, 4, 4)
    with pytest.raises(UserError, match="no classes, but mask"):
        _ = found.labels


@pytest.mark.parametrize("name", ["classes.json", "tokenizer.json", "vocabulary.json", ".sums.json"])
def test_a_changed_byte_of_what_a_run_kept_is_named(name, classifier_run, tmp_path):
    run = shutil.copytree(classifier_run.path, tmp_path / "run")
    file = run / "kept" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"kept/{re.escape(name)} is damaged"):
        paceline.open(run)


def test_a_spec_that_was_edited_since_is_named(classifier_run, tmp_path):
    """With other heads, the same weights fit and say something else."""
    run = shutil.copytree(classifier_run.path, tmp_path / "run")
    text = (run / "spec.yaml").read_text()
    heads = re.search(r"heads: (\d+)", text)[1]
    (run / "spec.yaml").write_text(text.replace(f"heads: {heads}", "heads: 1"))
    with expect_error("conflict", "model.heads"):
        paceline.open(run)
