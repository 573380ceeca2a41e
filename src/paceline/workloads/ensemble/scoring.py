"""Score members and their ensemble on held-out rows, with bootstrap errors.

All are judged on the same drawn rows, so that the error of a difference is far smaller than that of either side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.io.table import Table
from paceline.nn.class_metrics import class_sums, list_class_metrics
from paceline.workloads.ensemble.combination import compute_logs

DRAWS = 200
BINS = 15
LOWER = ("loss", "rmse", "mae", "calibration_error")
ENSEMBLE = "ensemble"
Scorer = Callable[[np.ndarray], dict[str, float]]


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float  # standard error, by bootstrap

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Scores:
    rows: int
    each: Mapping[str, Mapping[str, Estimate]]  # by model, then by metric
    gains: Mapping[str, Mapping[str, Estimate]]


def score_classes(found_NC: np.ndarray, labels_N: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    import torch

    sums = class_sums(torch.as_tensor(compute_logs(found_NC)), torch.as_tensor(labels_N))
    return {
        **dict.fromkeys(("n", "of"), len(labels_N)),
        "loss": -float(compute_logs(found_NC)[np.arange(len(labels_N)), labels_N].mean()),
        **list_class_metrics({name: value.numpy() for name, value in sums.items()}),
        "calibration_error": compute_calibration_error(found_NC, labels_N),
        "classes": list(classes),
    }


def score_regression(found_N: np.ndarray, truth_N: np.ndarray) -> dict[str, Any]:
    square, spread = float(((found_N - truth_N) ** 2).mean()), float(truth_N.var())
    explained = {"r2": 1 - square / spread} if spread > 0 else {}
    error = float(np.abs(found_N - truth_N).mean())
    counted = dict.fromkeys(("n", "of"), len(truth_N))
    return {**counted, "loss": square, "rmse": square**0.5, "mae": error, **explained}


def compute_calibration_error(found_NC: np.ndarray, labels_N: np.ndarray) -> float:
    """Return the mean difference of the highest probability and the accuracy, over bins of rows."""
    sure, right = found_NC.max(1), found_NC.argmax(1) == labels_N
    groups = np.array_split(np.argsort(sure, kind="stable"), BINS)
    off = [abs(float(sure[rows].mean()) - float(right[rows].mean())) * len(rows) for rows in groups if len(rows)]
    return float(sum(off) / len(labels_N))


def score_members(outputs: Mapping[str, np.ndarray], truth: np.ndarray, seed: int = 0) -> Scores:
    scorers = {name: _build_scorer(found, truth) for name, found in outputs.items()}
    values = {name: score(np.ones(len(truth))) for name, score in scorers.items()}
    random = np.random.default_rng(seed)
    drawn: dict[str, list[dict[str, float]]] = {name: [] for name in scorers}
    for _ in range(DRAWS):
        times = np.bincount(random.integers(0, len(truth), len(truth)), minlength=len(truth)).astype(np.float64)
        for name, score in scorers.items():
            drawn[name].append(score(times))
    metrics = list(next(iter(values.values())))
    table = {name: {m: np.array([one[m] for one in draws]) for m in metrics} for name, draws in drawn.items()}

    def estimate(name: str, m: str) -> Estimate:
        return Estimate(values[name][m], float(np.nanstd(table[name][m])))

    def gain(name: str, m: str) -> Estimate:
        more, spread = values[ENSEMBLE][m] - values[name][m], np.nanstd(table[ENSEMBLE][m] - table[name][m])
        return Estimate(-more if m in LOWER else more, float(spread))

    each = {name: {m: estimate(name, m) for m in metrics} for name in scorers}
    gains = {name: {m: gain(name, m) for m in metrics} for name in scorers if name != ENSEMBLE}
    return Scores(len(truth), each, gains)


def build_score_table(found: Scores, weights: Mapping[str, float]) -> Table:
    """Build a row for each member and the ensemble: their scores with errors."""
    metrics = list(next(iter(found.each.values())))
    heads = [f"{metric} {'↓' if metric in LOWER else '↑'}" for metric in metrics]
    note = f"On {found.rows:,} held-out rows, ± the standard error of the bootstrap."
    for name, gains in found.gains.items():
        gain = gains[metrics[0]]
        how = "better" if gain.value >= 0 else "worse"
        note += f" The ensemble is {how} than {name} in {metrics[0]} by {replace(gain, value=abs(gain.value))}."
    table = Table("model", "weight", *heads, name="members", title="Members and ensemble", note=note)
    table.answer = _describe_best(found, metrics[-1])
    for name, each in found.each.items():
        weight = f"{weights[name]:.3f}" if name in weights else ""
        table.add_row(name, weight, *(str(each[metric]) for metric in metrics), chosen=name == ENSEMBLE)
    return table


def _describe_best(found: Scores, metric: str) -> str:
    """Return the answer of the page: what the ensemble gains over its best member."""
    best = min(found.gains, key=lambda name: found.gains[name][metric].value)
    gain = found.gains[best][metric]
    name = metric.upper() if metric in ("auc", "mae", "rmse") else metric
    does = "beats" if gain.value >= 0 else "loses to"
    return f"The ensemble {does} its best member, {best}, by {replace(gain, value=abs(gain.value))} {name}."


def _build_scorer(found: np.ndarray, truth: np.ndarray) -> Scorer:
    """Return the metrics as a function of how often each row counts."""
    if found.ndim == 1:
        squares, errors = (found - truth) ** 2, np.abs(found - truth)
        return lambda times: {
            "rmse": float(times @ squares / times.sum()) ** 0.5,
            "mae": float(times @ errors / times.sum()),
        }
    classes = found.shape[1]
    losses = -compute_logs(found)[np.arange(len(truth)), truth]
    cells = truth * classes + found.argmax(1)
    curves = [_RocCurve(found[:, number], truth == number) for number in range(int(classes == 2), classes)]

    def score(times: np.ndarray) -> dict[str, float]:
        table = np.bincount(cells, times, classes**2).reshape(classes, classes)
        support, said, right = table.sum(1), table.sum(0), table.diagonal()
        occurs = support + said > 0
        areas = np.array([curve.area(times) for curve in curves])
        return {
            "loss": float(times @ losses / times.sum()),
            "accuracy": float(right.sum() / table.sum()),
            "macro_f1": float((2 * right[occurs] / (support + said)[occurs]).mean()),
            "auc": float(np.nanmean(areas)) if np.isfinite(areas).any() else np.nan,
        }

    return score


class _RocCurve:
    """Rows in the order of their score, equal ones together, so that the area takes two sums."""

    def __init__(self, scores: np.ndarray, own: np.ndarray) -> None:
        self.order = np.argsort(scores, kind="stable")
        self.group = np.concatenate([[0], np.cumsum(np.diff(scores[self.order]) > 0)])
        self.own = own[self.order]

    def area(self, times: np.ndarray) -> float:
        counts = times[self.order]
        own = np.bincount(self.group, counts * self.own)
        others = np.bincount(self.group, counts * ~self.own)
        pairs = own.sum() * others.sum()
        return float((own * (np.cumsum(others) - others / 2)).sum() / pairs) if pairs else np.nan
