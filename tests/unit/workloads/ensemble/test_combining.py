"""The few numbers that make several predictions one, against what they must give."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import TypeAdapter

from paceline.workloads.ensemble.combination import (
    Combination,
    compute_logs,
    fit_class_combination,
    fit_number_combination,
)
from paceline.workloads.ensemble.members import compute_mean_loss
from paceline.workloads.ensemble.scoring import ENSEMBLE, compute_calibration_error, score_members

ROWS = 4000


@pytest.fixture(scope="module")
def voices():
    """Three members that each know a part of the truth; the last shouts, and so is not calibrated."""
    random = np.random.default_rng(0)
    known = random.normal(size=(3, ROWS, 3))
    labels = (known.sum(0) + random.gumbel(size=(ROWS, 3))).argmax(1)
    powers = np.exp(known * np.array([0.8, 0.8, 4.0])[:, None, None])
    return powers / powers.sum(2, keepdims=True), labels


@pytest.mark.parametrize("how", ["average", "weighted", "stack"])
@pytest.mark.parametrize("calibrate", ["none", "temperature"])
def test_every_combination_is_a_distribution_that_survives_its_file(voices, how, calibrate):
    outputs, labels = voices
    found = fit_class_combination(outputs, labels, how, calibrate)
    whole = found(outputs)
    assert calibrate == "none" or compute_calibration_error(whole, labels) < 0.03
    assert np.allclose(whole.sum(1), 1)
    assert min(found.weights) >= 0
    assert how == "stack" or sum(found.weights) == pytest.approx(1)
    best = min(compute_mean_loss(one, labels) for one in outputs)
    assert compute_mean_loss(whole, labels) < best or (how, calibrate) == ("average", "none")
    again = TypeAdapter(Combination).validate_json(json.dumps(asdict(found)), strict=True)
    assert np.array_equal(again(outputs), whole)


def test_a_stack_is_scikit_learns_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(1)
    odds = random.normal(size=(2, ROWS))
    labels = (odds.sum(0) + random.logistic(size=ROWS) > 0).astype(np.int64)
    second = 1 / (1 + np.exp(-odds))
    found = fit_class_combination(np.stack([1 - second, second], axis=2), labels, "stack", "none")
    theirs = LogisticRegression(C=1.0, tol=1e-8).fit(odds.T, labels)
    assert found.weights == pytest.approx(theirs.coef_[0], rel=0.01)
    assert found.shifts[1] - found.shifts[0] == pytest.approx(theirs.intercept_[0], abs=0.01)


def test_numbers_are_averaged_weighed_and_stacked():
    random = np.random.default_rng(2)
    truth = random.normal(5, 2, ROWS)
    outputs = np.stack([truth + random.normal(0, 1, ROWS), 0.5 * truth + random.normal(0, 1, ROWS)])
    fits = {how: fit_number_combination(outputs, truth, how) for how in ("average", "weighted", "stack")}
    losses = {how: compute_mean_loss(fit(outputs), truth) for how, fit in fits.items()}
    assert losses["stack"] < losses["weighted"] <= losses["average"]
    assert sum(fits["weighted"].weights) == pytest.approx(1)


def test_the_bootstrap_error_is_that_of_theory_and_gains_are_paired(voices):
    from sklearn.metrics import f1_score, roc_auc_score

    outputs, labels = voices
    whole = fit_class_combination(outputs, labels, "stack", "none")(outputs)
    found = score_members({"first": outputs[0], ENSEMBLE: whole}, labels)
    losses = -compute_logs(outputs[0])[np.arange(ROWS), labels]
    first = found.each["first"]
    assert first["loss"].error == pytest.approx(losses.std() / ROWS**0.5, rel=0.2)
    assert first["macro_f1"].value == pytest.approx(f1_score(labels, outputs[0].argmax(1), average="macro"))
    assert first["auc"].value == pytest.approx(roc_auc_score(labels, outputs[0], multi_class="ovr"))
    gain = found.gains["first"]["loss"]
    assert gain.value == pytest.approx(first["loss"].value - found.each[ENSEMBLE]["loss"].value)
    assert gain.value > 3 * gain.error
