"""Combine the predictions of several models by a few numbers, fitted on rows that none of the models saw.

Of classes, with p_j the probabilities that member j gives:

    average, weighted   sum of w_j × softmax(s_j × log p_j), the w_j summing to 1
    stack               softmax of the sum of w_j × log p_j, and a shift for each class

and what comes out is calibrated. Of numbers: their mean, a weighted mean, or a linear combination and a shift.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import softmax

from paceline.workloads.ensemble.sections import Calibrate, Combine

LEAST = 1e-12  # of what a member rules out
ROUNDS = 500


@dataclass(frozen=True)
class Logistic:
    """Softmax of weighted log-probabilities: of one member, a calibration; of several, a stack."""

    weights: tuple[float, ...]
    shifts: tuple[float, ...]

    def __call__(self, logs_JNC: np.ndarray) -> np.ndarray:
        return np.asarray(softmax(np.tensordot(np.array(self.weights), logs_JNC, 1) + np.array(self.shifts), -1))


@dataclass(frozen=True)
class Combination:
    how: str
    weights: tuple[float, ...]
    scales: tuple[float, ...] = ()  # of log-probabilities, before averaging
    shifts: tuple[float, ...] = ()  # of each class, or one
    calibration: Logistic | None = None

    def __call__(self, outputs: np.ndarray) -> np.ndarray:
        """(members, rows, classes) -> (rows, classes); of numbers (members, rows) -> (rows,)."""
        if outputs.ndim == 2:
            return np.asarray(np.array(self.weights) @ outputs + sum(self.shifts))
        logs_JNC = compute_logs(outputs)
        if self.how == "stack":
            found = Logistic(self.weights, self.shifts)(logs_JNC)
        else:
            scaled = softmax(np.array(self.scales)[:, None, None] * logs_JNC, -1)
            found = np.asarray(np.tensordot(np.array(self.weights), scaled, 1))
        return found if self.calibration is None else self.calibration(compute_logs(found)[None])


def fit_class_combination(
    outputs_JNC: np.ndarray, labels_N: np.ndarray, how: Combine, calibrate: Calibrate
) -> Combination:
    logs, members = compute_logs(outputs_JNC), len(outputs_JNC)
    if how == "stack":
        stacked = _fit_logistic(logs, labels_N, shifts=True)
        found = Combination(how, stacked.weights, shifts=stacked.shifts)
    else:
        scales = np.ones(members)
        if calibrate != "none":
            scales = np.array([_fit_logistic(one[None], labels_N, shifts=False).weights[0] for one in logs])
        own = np.take_along_axis(softmax(scales[:, None, None] * logs, -1), labels_N[None, :, None], 2)[:, :, 0]
        weights = _fit_mixture(own) if how == "weighted" else np.full(members, 1 / members)
        found = Combination(how, tuple(weights.tolist()), scales=tuple(scales.tolist()))
    if calibrate == "none":
        return found
    return replace(found, calibration=_fit_logistic(compute_logs(found(outputs_JNC))[None], labels_N, shifts=False))


def fit_number_combination(outputs_JN: np.ndarray, truth_N: np.ndarray, how: Combine) -> Combination:
    from scipy.optimize import lsq_linear, nnls

    members = len(outputs_JN)
    if how == "average":
        return Combination(how, (1 / members,) * members)
    if how == "stack":
        columns = np.vstack([outputs_JN, np.ones_like(truth_N)]).T
        least = [0.0] * members + [-np.inf]
        *weights, shift = lsq_linear(columns, truth_N, bounds=(least, np.inf)).x.tolist()
        return Combination(how, tuple(weights), shifts=(shift,))
    heavy = 1e3 * float(np.abs(outputs_JN).max() + 1) * len(truth_N) ** 0.5  # one more row, which makes the sum 1
    weights = nnls(np.vstack([outputs_JN.T, np.full(members, heavy)]), np.append(truth_N, heavy))[0]
    return Combination(how, tuple((weights / weights.sum()).tolist()))


def compute_logs(probabilities: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(np.clip(probabilities, LEAST, 1.0)))


def _fit_logistic(logs_JNC: np.ndarray, labels_N: np.ndarray, *, shifts: bool) -> Logistic:
    """Fit by L-BFGS, weights of 0 or more; the penalty is that of scikit-learn's logistic regression."""
    from scipy.optimize import minimize

    members, rows, classes = logs_JNC.shape
    truth = np.zeros((rows, classes))
    truth[np.arange(rows), labels_N] = 1.0

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        shift = values[members:] if shifts else np.zeros(classes)
        logits = np.tensordot(values[:members], logs_JNC, 1) + shift
        said = softmax(logits, -1)
        loss = -float(np.log(said[np.arange(rows), labels_N].clip(1e-300)).sum())
        off = said - truth
        slope = [float((off * one).sum()) for one in logs_JNC]
        gradient = np.array([*slope, *(off.sum(0) if shifts else ())])
        return (loss + 0.5 * float(values @ values)) / rows, (gradient + values) / rows

    start = np.array([1 / members] * members + [0.0] * (classes if shifts else 0))
    bounds = [(0.0, None)] * members + [(None, None)] * (len(start) - members)
    found = minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": ROUNDS}).x
    return Logistic(tuple(found[:members].tolist()), tuple(found[members:].tolist()) if shifts else (0.0,) * classes)


def _fit_mixture(own_JN: np.ndarray) -> np.ndarray:
    """Return the weights that sum to 1 and make the labels likeliest, by EM."""
    weights = np.full(len(own_JN), 1 / len(own_JN))
    for _ in range(ROUNDS):
        parts = weights[:, None] * own_JN
        weights = (parts / parts.sum(0)).mean(1)
    return weights
